"""A real topic of numbers, three triggers over it, and what must hold for their events, commits and dead letters."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import yaml
from tests.chaos.conftest import read_all
from tests.services.triggerer.proving import Trying

from tidemill.deadletters.letter import Letter, decode_letter

PARTITIONS = 4


class NumberedTopic:
    """A new topic, the notes of the triggers that read it, and what others can see of their group.

    Args:
        notes: The file in which the triggers note what happens to them.
        broker: A real one.
    """

    def __init__(self, notes: Path, broker: Any) -> None:
        self.notes = notes
        self.bootstrap = broker.bootstrap
        self.topic = f"proof-{uuid.uuid4().hex[:8]}"
        self._producer = ck.Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, "enable.idempotence": True})
        broker.create_topic(self.topic, partitions=PARTITIONS)

    def feed(self, count: int, start: int = 0) -> None:
        """Write numbers; each tells its partition and offset, so no batch may overtake one that is sent again."""
        for n in range(start, start + count):
            self._producer.produce(self.topic, str(n).encode(), partition=n % PARTITIONS)
            self._producer.poll(0)
        assert self._producer.flush(30) == 0

    def committed(self) -> dict[int, int]:
        consumer = ck.Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.topic})
        try:
            wanted = [ck.TopicPartition(self.topic, n) for n in range(PARTITIONS)]
            return {p.partition: max(0, p.offset) for p in consumer.committed(wanted, timeout=60)}
        except ck.KafkaException as error:
            if error.args[0].code() != ck.KafkaError.NOT_COORDINATOR:
                raise
            return dict.fromkeys(range(PARTITIONS), 0)  # nobody has heard of the group yet
        finally:
            consumer.close()

    def letters(self) -> list[Letter]:
        return [decode_letter(data) for data in read_all(self.bootstrap, f"{self.topic}_dlq")]

    def noted(self, what: str) -> Counter[int]:
        """Return how often each number was noted."""
        notes = [line.split() for line in self.notes.read_text().splitlines()]
        return Counter(int(number) for noted, _, number in notes if noted == what)

    def write_list(self, folder: Path, kind: str, entries: dict[str, dict[str, Any]], restart: dict[str, str]) -> None:
        """Write a list, for a host that may be reading it; `restart` says by name when a trigger runs again."""
        common = {"brokers": self.bootstrap, "topic": self.topic, "notes": str(self.notes)}
        spec = [
            {"name": name, "classpath": f"tests.services.triggerer.proving.{kind}", "kwargs": {**common, **kwargs},
             "restart": restart.get(name, "on-failure")}
            for name, kwargs in entries.items()
        ]  # fmt: skip
        written = folder / "spec.new"
        written.write_text(yaml.safe_dump(spec))
        written.replace(folder / "spec.yaml")


class Trio:
    """Three triggers over one topic: one raises now and then, one ends after each event, one is slow.

    Args:
        topic: Which.
        count: How many messages it has in the end.
    """

    RAISES, ALWAYS = 100, 200

    def __init__(self, topic: NumberedTopic, count: int) -> None:
        self.topic, self.count = topic, count
        self.entries: dict[str, dict[str, Any]] = {
            "raising": {"raise_every": self.RAISES, "raise_always_every": self.ALWAYS},
            "ending": {"ends": True, "modulo": 3},
            "slow": {"pause": 0.001, "modulo": 2},
        }
        defaults = {"modulo": 1, "pause": 0.0, "ends": False, "raise_every": 0, "raise_always_every": 0, "version": 0}
        # As they are written down: a trigger that says it otherwise waits for the store before each of its runs.
        self.entries = {name: defaults | kwargs for name, kwargs in self.entries.items()}
        topic.notes.touch()

    def write(self, folder: Path) -> None:
        self.topic.write_list(folder, "Trying", self.entries, {"ending": "always"})

    def accepted(self, below: dict[int, int]) -> set[tuple[str, int]]:
        """Return which trigger has to have an event of which message, of those below some offsets."""
        return {
            (name, number)
            for name, kwargs in self.entries.items()
            for number in range(0, PARTITIONS * max(below.values()), kwargs.get("modulo", 1))
            if number // PARTITIONS < below[number % PARTITIONS]
        }

    def check_letters(self) -> set[int]:
        """Return which messages have letters: each for failures that happened, of the trigger that it names."""
        letters = self.topic.letters()
        raised = self.topic.noted("raised")  # only now: a host may still be writing both, a note first
        lettered = set()
        for letter in letters:
            [source] = letter.sources
            number = source.offset * PARTITIONS + source.partition
            assert letter.kind == "failed"
            assert f"trigger raising: ValueError: {number} is not to my taste" in letter.error
            assert "ending" not in letter.error, letter.error
            assert "slow" not in letter.error, letter.error
            assert Trying.MAX_REDELIVERIES < letter.attempt_count <= raised[number]
            lettered.add(number)
        return lettered

    def check_committed(self, committed: dict[int, int], rows: Iterable[tuple[str, dict[str, int]]]) -> None:
        """Hold what was committed against what is stored and dead-lettered by now."""
        missing = self.accepted(committed) - {(name, row["number"]) for name, row in rows}
        if missing:
            lettered = self.check_letters()
            lost = sorted((number, name) for name, number in missing if number not in lettered)
            assert not lost, f"committed, and neither stored nor dead-lettered: {lost[:20]}"

    def check_end(self, rows: Iterable[tuple[str, dict[str, int]]]) -> set[int]:
        """Hold what is stored and dead-lettered in the end against what was accepted; return what has letters."""
        rows, committed = list(rows), self.topic.committed()
        assert sum(committed.values()) == self.count
        fired = Counter((name, row["number"]) for name, row in rows)
        assert set(fired.values()) == {1}, "an identity was stored twice"
        assert not set(fired) - self.accepted(committed)
        self.check_committed(committed, rows)
        lettered = self.check_letters()
        assert lettered == set(range(0, self.count, self.ALWAYS))
        assert set(self.topic.noted("raised")) == set(range(0, self.count, self.RAISES))
        assert not [number for name, number in fired if name == "raising" and number in lettered]
        others = [one for one in self.accepted(committed) - set(fired) if one[0] != "raising"]
        print(f"{len(lettered)} letters; unread by others when dead-lettered: {len(others)}")
        return lettered
