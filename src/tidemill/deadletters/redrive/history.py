"""Reads which of a pipeline's dead letters redrives have sent, from the notes saved with their cursors.

Invariants: reading joins no group and changes nothing. A redrive whose cursor has expired (brokers forget it after
`offsets.retention.minutes`, a week by default) is not listed. No letter is reported as sent that was not.
All calls block, so do not make them on event loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import confluent_kafka as ck
import msgspec
from confluent_kafka.admin import AdminClient

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import REDRIVE_PREFIX, LetterCriteria
from tidemill.core.deadletters.redrive_record import RedriveRecord, decode_record
from tidemill.core.errors import RemoteError
from tidemill.core.topic_identity import is_replaced, split_mark
from tidemill.deadletters.opening import Letters
from tidemill.deadletters.reader import FoundLetter, LetterReader, extract_facts
from tidemill.runtime.kafka.client import CALL_SECONDS, LibraryLog, describe_client_error, make_client_config, scrub

if TYPE_CHECKING:
    from tidemill.deadletters.folder_reader import FolderReader

#: How many groups' offsets are requested at once.
_AT_ONCE = 100


class Redriven(msgspec.Struct, frozen=True):
    """One time that a letter was sent again.

    Attributes:
        at: The time, in seconds since the epoch.
        to: The target: source, sink, or a topic.
    """

    at: int
    to: str


class PastRedrive(msgspec.Struct, frozen=True):
    """A redrive that has saved its cursor; runs that send the same letters to the same target count as one redrive.

    Attributes:
        to: The target: source, sink, or a topic.
        criteria: The criteria that selected the letters.
        first_at: When its first known run ended, in seconds since the epoch.
        last_at: When it processed its last letter.
        records: How many records of the letters' topic it has processed, as far as known.
        unsent: How many letters it selected and did not send, as far as known.
    """

    to: str
    criteria: LetterCriteria
    first_at: int
    last_at: int
    records: int
    unsent: int


class RedriveHistory:
    """The redrives of one dead-letter topic.

    Args:
        records: The saved notes of redrives, by partition of the dead-letter topic.
    """

    def __init__(self, records: Mapping[int, list[RedriveRecord]]) -> None:
        self._records = records

    def list_redrives(self) -> list[PastRedrive]:
        """Return the known redrives, the latest first."""
        found: dict[tuple[str, LetterCriteria], PastRedrive] = {}
        for records in self._records.values():
            for record in records:
                if not record.runs:
                    continue
                key = (record.to, record.criteria)
                before = found.get(key)
                times = [run.at for run in record.runs]
                if before is not None:
                    times += [before.first_at, before.last_at]
                found[key] = PastRedrive(
                    record.to,
                    record.criteria,
                    min(times),
                    max(times),
                    sum(run.end - run.first for run in record.runs) + (before.records if before is not None else 0),
                    len(set(record.unsent)) + (before.unsent if before is not None else 0),
                )
        return sorted(found.values(), key=lambda each: each.last_at, reverse=True)

    def list_redriven(self, found: FoundLetter) -> list[Redriven]:
        """Return when and to which target a letter was sent again, the oldest first; each redrive counts once, by its
        last time.
        """
        if found.letter is None:
            return []
        sent = []
        for record in self._records.get(found.partition, ()):
            at = record.find_sent_at(found.offset, extract_facts(found.letter, text=bool(record.criteria.text)))
            if at is not None:
                sent.append(Redriven(at, record.to))
        return sorted(sent, key=lambda each: each.at)


def read_history(settings: Settings, letters: Letters) -> RedriveHistory:
    """Return the history of a pipeline's dead letters.

    Raises:
        RemoteError: The brokers do not answer, or deny access to consumer groups.
    """
    if isinstance(letters, LetterReader):
        return _read_groups(settings, letters.find_ranges(), letters.find_topic_id())
    return _read_journals(letters)


def _read_journals(letters: FolderReader) -> RedriveHistory:
    from tidemill.deadletters.redrive.folder_cursor import read_journals

    records: dict[int, list[RedriveRecord]] = {}
    for entries in read_journals(letters.path):
        for number in letters.find_ranges():
            name, mark = letters.identify(number)
            entry = entries.get(name)
            record = decode_record(entry.note) if entry is not None and entry.mark == mark else None
            if record is not None:
                records.setdefault(number, []).append(record)
    return RedriveHistory(records)


def _read_groups(settings: Settings, partitions: Iterable[int], topic_id: str | None) -> RedriveHistory:
    config = make_client_config(settings.kafka, settings.dlq_brokers, {})
    quiet: dict[str, Any] = {**config, "error_cb": lambda error: None}
    client = AdminClient(quiet, logger=LibraryLog())
    records: dict[int, list[RedriveRecord]] = {}
    try:
        for saved in _list_saved(client, settings.dlq_topic, list(partitions)):
            of_topic, note = split_mark(saved.metadata or "")
            record = decode_record(note) if saved.offset >= 0 else None
            if record is not None and not is_replaced(of_topic, topic_id):
                records.setdefault(saved.partition, []).append(record)
    except (ck.KafkaException, TimeoutError) as error:
        text = scrub(describe_client_error(error), config) or "no answer"
        raise RemoteError(f"dlq: cannot look up earlier redrives at {settings.dlq_brokers}: {text}") from None
    return RedriveHistory(records)


def _list_saved(client: AdminClient, topic: str, partitions: list[int]) -> Iterator[Any]:
    listed = client.list_consumer_groups(request_timeout=CALL_SECONDS).result(CALL_SECONDS + 1.0)
    if listed.errors:
        raise ck.KafkaException(listed.errors[0])
    groups = [each.group_id for each in listed.valid if each.group_id.startswith(REDRIVE_PREFIX)]
    for first in range(0, len(groups), _AT_ONCE):
        answers = [
            client.list_consumer_group_offsets(
                [ck.ConsumerGroupTopicPartitions(group, [ck.TopicPartition(topic, number) for number in partitions])],
                request_timeout=CALL_SECONDS,
            )[group]
            for group in groups[first : first + _AT_ONCE]
        ]
        for answer in answers:
            yield from answer.result(CALL_SECONDS + 1.0).topic_partitions
