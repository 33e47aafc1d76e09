"""What is promised of shared streams, proven with a host in a process of its own and a real Kafka."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import prepared
from tests.services.triggerer.proof_topic import PARTITIONS, NumberedTopic, Trio
from tests.size import sized
from tests.until import wait_until

ROOT = Path(__file__).parents[3]
MAX_OUTSTANDING = 200


class Proof(NumberedTopic):
    """A topic of numbers, a list of triggers over it, and hosts that run the list, one after another."""

    def __init__(self, folder: Path, broker: Any) -> None:
        super().__init__(folder / "notes", broker)
        self.folder = folder
        self.process: prepared.Forked | None = None
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "XDG_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "ignore",
                    "TIDEMILL_TRIGGERER__SHARED_STREAM_MAX_OUTSTANDING": str(MAX_OUTSTANDING)}  # fmt: skip
        self.env.pop("TIDEMILL_CONFIG", None)

    def triggers(self, entries: dict[str, dict[str, Any]]) -> None:
        self.write_list(self.folder, "Noting", entries, {})

    def start(self, module: str = "tidemill", **env: str) -> prepared.Forked:
        with (self.folder / "log.txt").open("ab") as log:
            self.process = prepared.start(
                [module, "triggers", "run", "spec.yaml"],
                code=prepared.MODULE, cwd=self.folder, env={**self.env, **env}, stdout=log, stderr=log,
            )  # fmt: skip
        return self.process

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def rows(self) -> list[tuple[str, dict[str, int]]]:
        """Return who fired what, as it is stored."""
        path = self.folder / "tidemill.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            try:
                found = database.execute(
                    "SELECT t.name, e.payload FROM trigger_event e JOIN trigger t ON t.id = e.trigger_id ORDER BY e.id"
                ).fetchall()
            except sqlite3.OperationalError:
                return []  # the tables are being made
        return [(name, json.loads(payload)) for name, payload in found]

    def until(self, condition: Callable[[], Any], seconds: float) -> None:
        def met() -> Any:
            assert self.process is None or self.process.poll() is None, self.log_end()
            return condition()

        wait_until(met, seconds, what=self.log_end, pause_seconds=0.05)

    def log_end(self) -> str:
        return (self.folder / "log.txt").read_text()[-4000:]


@pytest.fixture
def proof(tmp_path, embedded_kafka) -> Iterator[Proof]:
    made = Proof(tmp_path, embedded_kafka)
    yield made
    made.end()


MODULI = {"twos": 2, "threes": 3, "fives": 5}


@pytest.mark.long  # the last test of this file has kills, failures and reloads together
@pytest.mark.timeout(400)
def test_a_host_that_is_killed_again_and_again_loses_nothing_and_commits_nothing_that_is_not_stored(proof):
    count, kills = sized((3_000, 2), (6_000, 4))
    chance = random.Random(8)
    proof.feed(count)
    named = {name: {"modulo": modulo, "pause": 0.001, "notes": ""} for name, modulo in MODULI.items()}
    bare = {f"bare-{name}": {**kwargs, "identity": False} for name, kwargs in named.items()}
    proof.triggers({**named, **bare})
    allowed: Counter[str] = Counter()
    for kill in range(kills):
        process = proof.start()
        before = len(proof.rows())
        proof.until(lambda before=before: len(proof.rows()) > before + 50, 60)
        time.sleep(chance.uniform(0.1, 1.0))  # the moment of the kill is what is random
        process.send_signal(signal.SIGKILL)
        process.wait()
        committed, rows = proof.committed(), proof.rows()
        assert sum(committed.values()) < count, "the kill came too late to prove anything"
        stored = {(name, row["partition"], row["offset"]) for name, row in rows}
        assert_stored_below(committed, stored, count)
        # What was stored and not committed when it was killed may be reprocessed, and nothing else.
        again = {(name, p, offset) for name, p, offset in stored if offset >= committed[p]}
        outstanding = {(p, offset) for _, p, offset in again}
        assert len(outstanding) <= 2 * MAX_OUTSTANDING, "more was done than may be outstanding"
        allowed.update(name for name, _, _ in again)
        print(f"kill {kill}: committed {sum(committed.values())}, outstanding {len(outstanding)}")
    proof.start()
    proof.until(lambda: sum(proof.committed().values()) == count, 120)
    fired = Counter((name, row["number"]) for name, row in proof.rows())
    for name, modulo in MODULI.items():
        numbers = range(0, count, modulo)
        assert {n for who, n in fired if who == name} == set(numbers)
        assert all(fired[name, n] == 1 for n in numbers), "an identity was stored twice"
        assert {n for who, n in fired if who == f"bare-{name}"} == set(numbers)
        duplicates = sum(times - 1 for (who, _), times in fired.items() if who == f"bare-{name}")
        print(name, "duplicates", duplicates, "of at most", allowed[f"bare-{name}"])
        assert duplicates <= allowed[f"bare-{name}"]
    assert proof.process is not None
    proof.process.terminate()
    assert proof.process.wait(60) == 0


def assert_stored_below(committed: dict[int, int], stored: set[tuple[str, int, int]], count: int) -> None:
    for name, modulo in MODULI.items():
        for number in range(0, count, modulo):
            partition, offset = number % PARTITIONS, number // PARTITIONS
            if offset < committed[partition]:
                assert (name, partition, offset) in stored, f"{number} was committed, and {name}'s event is not stored"
                assert (f"bare-{name}", partition, offset) in stored


def test_an_event_that_one_of_three_times_out_on_is_redelivered_and_clean_ones_are_not(proof):
    count = sized(300, 400)
    every, timeout = 100, 0.5
    proof.notes.touch()
    late = {"modulo": 1, "late_every": every, "late_seconds": 3 * timeout}
    proof.triggers({"late": late, "one": {"modulo": 1}, "two": {"modulo": 2}})
    proof.start(TIDEMILL_TRIGGERER__SHARED_STREAM_ACK_TIMEOUT=str(timeout))

    def done(fed: int) -> bool:
        committed = proof.committed()
        fired = {row["number"] for name, row in proof.rows() if name == "late"}
        # What is given while it is away, it never gets; what it was late with, it has to get again.
        for number in proof.noted("late"):
            if number // PARTITIONS < committed[number % PARTITIONS]:
                assert number in fired, f"{number} was committed before it was stored"
        return sum(committed.values()) == fed

    for start in range(0, count, every):
        # A hundred at a time: what is fanned out while the late one is away, for its restart, is not for it.
        proof.feed(every, start)
        proof.until(lambda fed=start + every: done(fed), 60)
    wanted = set(proof.noted("late"))
    assert wanted == set(range(0, count, every))
    fired = Counter((name, row["number"]) for name, row in proof.rows())
    assert wanted <= {number for name, number in fired if name == "late"}
    assert set(fired.values()) == {1}
    assert {number for name, number in fired if name == "one"} == set(range(count))
    notes = [line.split() for line in proof.notes.read_text().splitlines()]
    clean: set[str] = set()
    for what, name, number in notes:
        if what == "given":
            assert number not in clean, f"{number} was clean, and was given to {name} again"
        elif what == "clean":
            clean.add(number)
    assert len(clean) == count
    print("given again", len([1 for what, name, _ in notes if what == "given" and name == "one"]) - count)


class Trial(Trio):
    """Three triggers over one topic, whose host is told again and again to read its list.

    Args:
        proof: Where.
        count: How many messages.
        hangup_seconds: How often the list is written and the host told to read it again.
    """

    def __init__(self, proof: Proof, count: int, hangup_seconds: float) -> None:
        super().__init__(proof, count)
        self.proof, self.hangup_seconds = proof, hangup_seconds
        self.hangups = 0
        self._hung_up_at = 0.0
        proof.feed(count)
        self.write(proof.folder)

    def start(self) -> None:
        listening = self.starts()
        self.proof.start("tests.services.triggerer.quick_host")
        # Before that a SIGHUP ends it, as it ends any process.
        self.proof.until(lambda: self.starts() > listening, 30)

    def starts(self) -> int:
        log = self.proof.folder / "log.txt"
        return log.read_text().count("the trigger host is starting") if log.exists() else 0

    def hang_up(self) -> None:
        """Have the list read again when it is time; one trigger of it is another version of itself."""
        if time.monotonic() - self._hung_up_at < self.hangup_seconds or self.proof.process is None:
            return
        self.hangups += 1
        name = list(self.entries)[self.hangups % len(self.entries)]
        self.entries[name]["version"] = self.hangups
        self.write(self.proof.folder)
        self.proof.process.send_signal(signal.SIGHUP)
        self._hung_up_at = time.monotonic()

    def until(self, condition: Callable[[], Any], seconds: float) -> None:
        def hung_up_or_met() -> Any:
            self.hang_up()
            return condition()

        self.proof.until(hung_up_or_met, seconds)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "kills", "hangup_seconds"),
    [
        pytest.param(2_000, 2, 0.5, id="short"),
        pytest.param(10_000, 5, 2.0, id="full", marks=pytest.mark.nightly),
    ],
)
def test_each_event_is_stored_once_or_dead_lettered_for_a_failure_on_it_while_its_host_is_killed_and_told_to_reload(
    proof, count, kills, hangup_seconds
):
    chance = random.Random(11)
    trial = Trial(proof, count, hangup_seconds)
    began = time.monotonic()
    for kill in range(1, kills + 1):
        trial.start()
        share = count * kill // (kills + 1)
        trial.until(lambda share=share: sum(proof.committed().values()) >= share, 120)
        over = time.monotonic() + chance.uniform(0.0, 0.5)  # the moment of the kill is what is random
        trial.until(lambda over=over: time.monotonic() >= over, 60)
        proof.process.send_signal(signal.SIGKILL)
        proof.process.wait()
        committed = proof.committed()
        assert sum(committed.values()) < count, "the kill came too late to prove anything"
        trial.check_committed(committed, proof.rows())
        print(f"kill {kill}: {sum(committed.values())} committed after {time.monotonic() - began:.1f} s")
    trial.start()
    trial.until(lambda: sum(proof.committed().values()) == count, 180)
    seconds = time.monotonic() - began
    proof.process.terminate()
    assert proof.process.wait(60) == 0

    trial.check_end(proof.rows())
    print(f"{count} messages in {seconds:.1f} s, {count / seconds:.0f}/s; {trial.hangups} reloads")
