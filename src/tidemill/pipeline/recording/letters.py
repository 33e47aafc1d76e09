"""Records dead letters once they are confirmed."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import DeadLetters, LetterStatistics
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.recorder.format.events import EventKind


class RecordedLetters:
    """Wraps dead letters and records each of them.

    Args:
        letters: Writes the letters.
        recorder: Records them.
    """

    def __init__(self, letters: DeadLetters, recorder: EngineRecorder) -> None:
        self._letters = letters
        self._recorder = recorder
        self._dropped = 0

    async def open(self) -> None:
        await self._letters.open()

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Write a letter; when it is confirmed or dropped, it is recorded and `done` is called."""

        def confirmed() -> None:
            self._record(letter)
            done()

        self._letters.put(letter, confirmed)

    def _record(self, letter: Letter) -> None:
        positions = [(source.topic, source.partition, source.offset) for source in letter.sources]
        self._recorder.note_letter(positions)
        source = letter.sources[0] if letter.sources else None
        data: dict[str, str | int | float] = {"letter_id": letter.letter_id, "kind": letter.kind.value}
        if len(letter.sources) + letter.sources_dropped > 1:
            data["messages"] = len(letter.sources) + letter.sources_dropped
        dropped = self._letters.statistics().dropped
        if dropped > self._dropped:
            self._dropped = dropped
            data["dropped"] = 1
        self._recorder.events.add(
            EventKind.DEAD_LETTERED,
            letter.error,
            partition=None if source is None else (source.topic, source.partition),
            offset=None if source is None else source.offset,
            task_id=letter.task_id,
            sink=f"sinks.{letter.sink_type}.{letter.sink_name}" if letter.sink_name else None,
            data=data,
            others=positions[1:],
        )

    def statistics(self) -> LetterStatistics:
        """Return how many letters were written and dropped."""
        return self._letters.statistics()

    def describe_wait(self) -> str | None:
        """Return why letters are waiting; None: no letter waits."""
        return self._letters.describe_wait()

    async def close(self) -> None:
        await self._letters.close()
