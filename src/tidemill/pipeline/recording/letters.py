"""Dead letters that are recorded once they are confirmed."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import DeadLetters, LetterStatistics
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.recorder.events import EventKind


class RecordedLetters:
    """Passes everything on to where letters go.

    Args:
        letters: Where they go.
        recorder: Where they are recorded.
    """

    def __init__(self, letters: DeadLetters, recorder: EngineRecorder) -> None:
        """Keep both."""
        self._letters = letters
        self._recorder = recorder
        self._dropped = 0

    async def open(self) -> None:
        """Connect."""
        await self._letters.open()

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Write a letter; it is recorded, and `done` called, when it is confirmed or dropped."""

        def confirmed() -> None:
            self._record(letter)
            done()

        self._letters.put(letter, confirmed)

    def _record(self, letter: Letter) -> None:
        places = [(source.topic, source.partition, source.offset) for source in letter.sources]
        self._recorder.note_letter(places)
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
            others=places[1:],
        )

    def statistics(self) -> LetterStatistics:
        """Return what became of letters so far."""
        return self._letters.statistics()

    def describe_stall(self) -> str | None:
        """Return why letters wait; None while none do."""
        return self._letters.describe_stall()

    async def close(self) -> None:
        """Release everything."""
        await self._letters.close()
