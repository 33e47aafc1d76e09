"""A redrive: reads the dead letters, sends those that match, and saves its progress.

`core.deadletters.redrive` decides; this shell reads, sends and saves. The redrive stops where the topic ended when the
redrive began. Letters that arrive meanwhile, about the messages it has just sent, are left to the next run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import (
    Batching,
    LetterCriteria,
    Recent,
    RedrivePace,
    RedrivePosition,
    RedriveTally,
    SinkNames,
    Target,
    UnsentReason,
    judge_letter,
)
from tidemill.core.deadletters.redrive_record import RedriveRecord, decode_record
from tidemill.core.errors import ConfigError
from tidemill.deadletters.opening import Letters, open_letters
from tidemill.deadletters.reader import FoundLetter, Reached, extract_facts
from tidemill.deadletters.redrive.cursor import RedriveCursor, make_cursor, name_redrive
from tidemill.deadletters.redrive.sinks import SinkTarget
from tidemill.deadletters.redrive.targets import NotSentError, RedriveItem, RedriveTarget, Unsent
from tidemill.deadletters.redrive.topics import TopicTarget, limit_batches

#: A batch is sent at this many letters or bytes, or this long after its first letter; a crash repeats at most one
#: batch.
BATCH_LETTERS = 200
BATCH_BYTES = 8 * 1024 * 1024
BATCH_SECONDS = 0.5
#: The batch is sent before any wait longer than this.
_SHORT_WAIT_SECONDS = 0.05
_SLICE_SECONDS = 0.1


class RedriveOrder(msgspec.Struct, frozen=True):
    """A request to send letters again.

    Attributes:
        criteria: Selects the letters.
        target: The kind of target.
        topic: The topic, for `Target.TOPIC`.
        limit: The maximum number of letters; None sends all.
        max_redrives: Skip messages that were sent again this often; None uses the configured limit.
        rate: The maximum number of messages or payloads per second; None is unlimited.
        dry_run: Send nothing, only show the letters that would be sent.
        restart: Start with the oldest letter, even if it was sent before.
        drop_headers: Send messages with unreadable headers without them.
    """

    criteria: LetterCriteria = LetterCriteria()
    target: Target = Target.SOURCE
    topic: str = ""
    limit: int | None = None
    max_redrives: int | None = None
    rate: float | None = None
    dry_run: bool = False
    restart: bool = False
    drop_headers: bool = False


class Redrive:
    """One run of a redrive; blocking.

    Args:
        settings: The pipeline's settings.
        order: The letters to send, and their target.
        stopped: Called between letters; once it returns true, the batch is sent, and the rest is left to the next run.
        watch: Called often, even while no letters arrive.
        shown: Called in a dry run with each letter that would be sent.
    """

    def __init__(
        self,
        settings: Settings,
        order: RedriveOrder,
        stopped: Callable[[], bool] = lambda: False,
        watch: Callable[[Redrive], None] = lambda redrive: None,
        shown: Callable[[RedriveItem], None] = lambda item: None,
    ) -> None:
        self._to = order.topic if order.target is Target.TOPIC else order.target.value
        where = f"{order.target.value}:{self._to}"
        self.name = name_redrive(settings, where, order.criteria)
        self.tally = RedriveTally()
        self.total = 0
        self.resumed = False
        self._settings = settings
        self._order = order
        self._stopped = stopped
        self._watch = watch
        self._shown = shown
        self._pace = RedrivePace(None if order.dry_run else order.rate)
        self._batching = Batching(BATCH_LETTERS, BATCH_BYTES, BATCH_SECONDS)
        self._recent = Recent()
        self._items: list[RedriveItem] = []
        self._cursor = RedrivePosition({}, {})
        self._records: dict[int, RedriveRecord] = {}
        self._unsent: dict[int, list[int]] = {}
        self._corrected: set[int] = set()
        self._max_redrives = settings.dlq.max_redrives if order.max_redrives is None else order.max_redrives
        self._configured = [(kind, name) for kind, named in settings.sinks.group_by_type().items() for name in named]
        self._names = SinkNames(order.criteria.sinks, self._configured)

    @property
    def left(self) -> int:
        """The number of records of the topic that were not read."""
        return self._cursor.left

    def run(self) -> RedriveTally:
        """Send letters until the end, the limit or a stop.

        Raises:
            ConfigError: The dead-letter topic or the target topic does not exist, or the sink filter has a name that no
                configured sink and no letter has.
            FencedError: Another process started the same redrive.
            RemoteError: Brokers or a sink do not answer; the next run continues after the letters that were sent.
        """
        with open_letters(self._settings, self.name) as box:
            ranges = box.find_ranges()
            cursor = self._make_cursor(box)
            target = self._make_target(cursor)
            try:
                target.open()
                starts = self._find_starts(box, cursor, ranges)
                ends = {number: end for number, (_, end) in ranges.items()}
                self._cursor = RedrivePosition(starts, ends)
                self.total = self._cursor.left
                self._pump(target, box.stream(starts, ends))
            finally:
                target.close()
                cursor.close()
        self._check_names()
        return self.tally

    def _check_names(self) -> None:
        # The name may occur in a letter that was not read.
        if self.left or self.resumed or not self._names.unknown:
            return
        listed = ", ".join(sorted(f"{kind}.{name}" for kind, name in self._configured)) or "none"
        raise ConfigError(
            f"dlq redrive: --sink {', '.join(sorted(self._names.unknown))}: no configured sink and no letter has this "
            f"name; configured: {listed}"
        )

    def _make_cursor(self, letters: Letters) -> RedriveCursor:
        settings, order = self._settings, self._order
        topic = order.topic if order.target is Target.TOPIC else ""

        def overrides() -> dict[str, Any]:
            return limit_batches(settings, topic) if settings.dlq_brokers == settings.kafka.brokers else {}

        return make_cursor(settings, letters, self.name, overrides, self._encode_note)

    def _make_target(self, cursor: RedriveCursor) -> RedriveTarget:
        saving = None if self._order.dry_run else cursor
        if self._order.target is Target.SINK:
            return SinkTarget(self._settings, saving, self._stopped)
        return TopicTarget(self._settings, saving, self._order.topic, drop_headers=self._order.drop_headers)

    def _find_starts(self, box: Letters, cursor: RedriveCursor, ranges: dict[int, tuple[int, int]]) -> dict[int, int]:
        committed = cursor.read(ranges)
        for number in ranges:
            kept = decode_record(committed[number][1]) if number in committed else None
            self._records[number] = kept or RedriveRecord(self._to, self._order.criteria)
        saved = {} if self._order.restart else {number: at for number, (at, _) in committed.items()}
        beyond = [number for number, at in saved.items() if at > ranges[number][1]]
        if beyond:
            raise ConfigError(
                f"dlq redrive: the cursor is beyond the end of {box.location}, partition {beyond[0]}, because the "
                "topic was recreated; use --restart to start over"
            )
        self.resumed = bool(saved)
        since = self._order.criteria.since
        by_time = box.find_offsets_at(since, ranges) if since is not None else {}
        return {number: max(low, saved.get(number, 0), by_time.get(number, 0)) for number, (low, _) in ranges.items()}

    def _pump(self, target: RedriveTarget, stream: Iterator[FoundLetter | Reached | None]) -> None:
        for found in stream:
            if isinstance(found, Reached):
                self._cursor.advance(found.partition, found.position)
            elif found is not None and not self._take(target, found):
                break
            if self._batching.is_due(time.monotonic()):
                self._flush(target)
            self._watch(self)
            if self._stopped() or self._limit_reached:
                break
        self._flush(target)
        if self._corrected:
            target.send((), {number: self._cursor.find_saved(number) for number in self._corrected})
        self._watch(self)

    def _encode_note(self, partition: int, position: int) -> str:
        """Return the note for a position that is about to be saved."""
        return self._advance_record(partition, position).encode()

    def _advance_record(self, partition: int, position: int) -> RedriveRecord:
        record = self._records[partition].copy()
        record.note_range(self._cursor.find_saved(partition), position, time.time(), self._unsent.get(partition, ()))
        return record

    @property
    def _limit_reached(self) -> bool:
        limit = self._order.limit
        return limit is not None and self.tally.sent + len(self._items) >= limit

    def _take(self, target: RedriveTarget, found: FoundLetter) -> bool:
        """Process one record of the topic; return False if the redrive was stopped first."""
        item = self._prepare(target, found)
        if item is not None:
            if not self._wait(target):
                return False
            now = time.monotonic()
            self._pace.note_sent(item.count, now)
            self._batching.add(item.size_bytes, now)
            self._items.append(item)
        self._cursor.advance(found.partition, found.offset + 1)
        return True

    def _prepare(self, target: RedriveTarget, found: FoundLetter) -> RedriveItem | None:
        letter = found.letter
        if letter is None:
            self.tally.note_skipped(UnsentReason.NO_LETTER)
            return None
        order = self._order
        facts = extract_facts(letter, text=bool(order.criteria.text))
        self._names.note_sink(facts.sink_type, facts.sink_name)
        why = judge_letter(facts, order.criteria, order.target, self._max_redrives)
        if why is None and self._recent.check_seen(letter.letter_id):
            why = UnsentReason.TWICE
        if why is not None:
            if why.failed:
                self._unsent.setdefault(found.partition, []).append(found.offset)
            self.tally.note_skipped(why, letter.letter_id, self._explain(why, facts.redrives))
            return None
        try:
            return target.prepare(letter, found.partition, found.offset)
        except NotSentError as error:
            self._unsent.setdefault(found.partition, []).append(found.offset)
            self.tally.note_skipped(error.why, letter.letter_id, str(error))
            return None

    def _explain(self, why: UnsentReason, redrives: int) -> str:
        if why is UnsentReason.MAX_REDRIVES:
            return (
                f"already sent again {redrives} times, and the limit is {self._max_redrives}; "
                f"use --max-redrives {redrives + 1} to send it once more"
            )
        return str(why.value)

    def _wait(self, target: RedriveTarget) -> bool:
        while (seconds := self._pace.find_wait(time.monotonic())) > 0:
            if seconds > _SHORT_WAIT_SECONDS and self._items:
                self._flush(target)
            time.sleep(min(seconds, _SLICE_SECONDS))
            self._watch(self)
            if self._stopped():
                return False
        return True

    def _flush(self, target: RedriveTarget) -> None:
        items, self._items = self._items, []
        self._batching.clear()
        if self._order.dry_run:
            for item in items:
                self._shown(item)
            unsent: Unsent = []
        else:
            positions = self._cursor.unsaved
            if not positions:
                return
            unsent = target.send(items, positions)
            self._note_saved(positions, unsent)
        for item, why, text in unsent:
            self.tally.note_skipped(why, item.letter.letter_id, text)
        self.tally.sent += len(items) - len(unsent)
        self.tally.messages += sum(item.count for item in items) - sum(item.count for item, _, _ in unsent)
        if self._order.target is not Target.SINK:
            self._note_parts(items, unsent)

    def _note_saved(self, positions: Mapping[int, int], unsent: Unsent) -> None:
        for number, at in positions.items():
            self._records[number] = self._advance_record(number, at)
            self._unsent.pop(number, None)
        self._cursor.note_saved(positions)
        for item, _, _ in unsent:
            self._records[item.partition].note_unsent(item.offset)
            self._corrected.add(item.partition)

    def _note_parts(self, items: Sequence[RedriveItem], unsent: Unsent) -> None:
        """Count letters that had no room for all their messages."""
        refused = {id(item) for item, _, _ in unsent}
        for item in items:
            if item.letter.sources_dropped and id(item) not in refused:
                self.tally.note_sent_in_part(item.letter.letter_id, item.letter.sources_dropped)
