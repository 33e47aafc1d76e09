"""Wrong types in what hooks return: named at once, with the field, what it is and what it has to be; never retried."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.conftest import message

from tidemill.core.errors import HandlerError
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.checks import check_action, check_tasks
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.sinks.fields import build_type_check, check_choices
from tidemill.sinks.payloads import (
    CollectResult,
    CustomPayload,
    FilePayload,
    HttpPayload,
    KafkaPayload,
    MongoPayload,
    PostgresPayload,
    RedisPayload,
)
from tidemill.testing import run_handler


def task(**fields: Any) -> ExecutorTask:
    return ExecutorTask(**{"task_id": "t7", **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task_id": 7}, "task_id must be a string, not int (7)"),
        ({"args": "-n 7"}, "args of task 't7' must be a list of strings, not str ('-n 7')"),
        ({"args": ["-n", 7]}, "args of task 't7' must be a list of strings, not one with int (7)"),
        ({"args": None}, "args of task 't7' must be a list of strings, not NoneType (None)"),
        ({"source_offsets": 7}, "source_offsets of task 't7' must be a list of whole numbers, not int (7)"),
        (
            {"source_offsets": ["7"]},
            "source_offsets of task 't7' must be a list of whole numbers, not one with str ('7')",
        ),
        ({"binary_path": Path("/bin/x")}, "binary_path of task 't7' must be a string or None, not PosixPath"),
        ({"stdin": 7}, "stdin of task 't7' must be a string, bytes or None, not int (7)"),
        ({"stdin": bytearray(b"x")}, "stdin of task 't7' must be a string, bytes or None, not bytearray"),
        ({"env": ["A=1"]}, "env of task 't7' must be a mapping of strings to strings, not list (['A=1'])"),
        ({"env": {"A": 1}}, "env of task 't7' must be a mapping of strings to strings, not one with int (1)"),
        ({"env": {1: "A"}}, "env of task 't7' must be a mapping of strings to strings, not one with int (1)"),
        ({"timeout_seconds": "5"}, "timeout_seconds of task 't7' must be a number of seconds or None, not str ('5')"),
        (
            {"timeout_seconds": True},
            "timeout_seconds of task 't7' must be a number of seconds or None, not bool (True)",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds of task 't7' must be more than 0, not 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds of task 't7' must be more than 0, not nan"),
        ({"labels": "x"}, "labels of task 't7' must be a mapping of strings to strings, not str ('x')"),
        ({"labels": {"a": None}}, "labels of task 't7' must be a mapping of strings to strings, not one with NoneType"),
        ({"precomputed": "ok"}, "precomputed of task 't7' must be a PrecomputedResult or None, not str ('ok')"),
        ({"parent_task_id": 7}, "parent_task_id of task 't7' must be a string, not int (7)"),
    ],
)
def test_a_field_of_a_task_with_a_wrong_type_is_named_with_what_it_is_and_what_it_has_to_be(fields, said) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        task(**fields)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stdout": 7}, "stdout of a PrecomputedResult must be a string or bytes, not int (7)"),
        ({"stderr": b"x"}, "stderr of a PrecomputedResult must be a string, not bytes"),
        ({"exit_code": "0"}, "exit_code of a PrecomputedResult must be a whole number, not str ('0')"),
    ],
)
def test_a_field_of_a_precomputed_result_with_a_wrong_type_is_named(fields, said) -> None:
    with pytest.raises(TypeError) as raised:
        PrecomputedResult(**fields)
    assert str(raised.value).startswith(said)


class Unchecked(ExecutorTask):
    """A task that is not checked when it is created."""

    def __post_init__(self) -> None: ...


class UncheckedResult(PrecomputedResult):
    """Likewise a result."""

    def __post_init__(self) -> None: ...


def test_tasks_of_a_subclass_that_skips_the_check_are_checked_when_a_hook_returns_them() -> None:
    for fields in ({"args": 7}, {"precomputed": UncheckedResult(stdout=7)}):  # type: ignore[arg-type]
        unchecked = Unchecked(**{"task_id": "t", **fields})  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            check_tasks("arrange", [unchecked])
    (found,) = check_tasks("arrange", [Unchecked("t", ["a"])])
    assert found.args == ("a",)


class Name(str):
    """A string of a type of its own, as numpy has one."""

    __slots__ = ()


def test_what_can_be_used_passes() -> None:
    tasks = [
        task(),
        task(task_id=Name("n"), args=(Name("a"), b"b", Path("c")), stdin=b"x", env={"A": "1"}, labels={"a": "b"}),
        task(source_offsets=range(3), timeout_seconds=0.5, binary_path=Name("x"), precomputed=PrecomputedResult(b"x")),
        task(timeout_seconds=float("inf"), metadata=None),
    ]
    assert check_tasks("arrange", tuple(tasks)) == tasks


def test_a_task_holds_plain_values_whatever_types_it_is_created_with() -> None:
    class Data(bytes):
        __slots__ = ()

    it = task(
        task_id=Name("n\ud800"),
        args=[Name("a"), b"b\xff", Path("c")],
        source_offsets=[True, 2],
        binary_path=Name("x"),
        stdin=Data(b"x"),
        env={Name("A"): Name("\ud800")},
        labels={Name("a"): Name("\ud800")},
        precomputed=PrecomputedResult(Name("o"), Name("e")),
        parent_task_id=Name("p"),
    )
    known = it.precomputed
    assert known is not None
    plain = [
        (it.task_id, "n\\ud800"),
        (it.args, ("a", "b\udcff", "c")),
        (it.source_offsets, (1, 2)),
        (it.binary_path, "x"),
        (it.stdin, b"x"),
        (dict(it.env), {"A": "\ud800"}),
        (dict(it.labels), {"a": "\\ud800"}),
        (known.stdout, "o"),
        (known.stderr, "e"),
        (it.parent_task_id, "p"),
    ]
    for value, expected in plain:
        assert (value, type(value)) == (expected, type(expected))
    texts = [it.task_id, *it.args, it.binary_path, *it.env, *it.env.values(), *it.labels, *it.labels.values()]
    assert {*map(type, texts)} == {str}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "arrange must return a list of ExecutorTask, not NoneType (None)"),
        (task(), "arrange must return a list of ExecutorTask, not ExecutorTask ("),
        (
            [task(), {"task_id": "x"}],
            "arrange must return a list of ExecutorTask; item 1 is dict ({'task_id': 'x'})",
        ),
    ],
)
def test_what_is_not_a_list_of_tasks_is_named(returned, said) -> None:
    with pytest.raises(TypeError) as raised:
        check_tasks("arrange", returned)
    assert str(raised.value).startswith(said)


def test_what_on_error_may_return_is_said_where_it_returns_something_else() -> None:
    assert check_action("skip") is ErrorAction.SKIP
    with pytest.raises(TypeError, match=r"on_error must return an ErrorAction \(RETRY, SKIP, DLQ\) or a list of Exec"):
        check_action({"action": "skip"})


class Returning(Handler[bytes, Any]):
    """Returns what it is given, for every message."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.errors = 0

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(**{"task_id": f"t{m.offset}", "source_offsets": (m.offset,), "binary_path": "true", **fields})
            for m in messages
            for fields in [self.fields if m.offset == 1 else {}]
        ]

    async def on_error(self, task, error):
        self.errors += 1
        return ErrorAction.RETRY


async def test_a_task_with_a_wrong_type_is_its_messages_letter_and_nothing_is_retried(rig) -> None:
    handler = Returning(stdin=7)
    run = rig(handler, [message(offset) for offset in range(3)])
    await run.committed(3)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == (LetterKind.ARRANGE, 1)
    assert letter.error.startswith("TypeError: stdin of task 't1' must be a string, bytes or None, not int (7) (")
    assert "test_types.py:" in letter.error, "the line that creates the task"
    assert run.engine.progress().tasks_done == 2
    assert handler.errors == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"args": ["a\0b"]}, "embedded null byte"),
        ({"args": ["\ud800"]}, "surrogates not allowed"),
        ({"stdin": "\ud800"}, "surrogates not allowed"),
        ({"env": {"A=B": "C"}}, "illegal environment variable name"),
        ({"args": ["x" * 300_000]}, "Argument list too long"),
    ],
)
async def test_a_task_that_no_system_can_start_is_tried_once_and_on_error_hears_of_it_once(rig, fields, said) -> None:
    handler = Returning(**fields)
    run = rig(handler, [message(offset) for offset in range(3)], executor={"max_retries": 5})
    await run.committed(3)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset, letter.attempt_count) == (LetterKind.TASK, 1, 1)
    assert "cannot be started" in letter.error
    assert said in letter.error
    assert handler.errors == 1


async def test_an_async_generator_as_arrange_is_named_in_the_letter(rig) -> None:
    class Yielding(Handler[bytes, Any]):
        async def arrange(self, messages, pending):
            yield ExecutorTask("t")

    run = rig(Yielding(), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.error == "TypeError: arrange returned an async generator; it must be an `async def` without `yield`"


# -- payloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (FilePayload(path=7), "FilePayload.path must be a string, not int (7)"),
        (FilePayload(sink=None), "FilePayload.sink must be a string, not NoneType (None)"),
        (FilePayload(path=b"x"), "FilePayload.path must be a string, not bytes (b'x')"),
        (KafkaPayload(key=7), "KafkaPayload.key must be bytes or a string or None, not int (7)"),
        (PostgresPayload(table=["t"]), "PostgresPayload.table must be a string, not list (['t'])"),
        (PostgresPayload(conflict=7), "PostgresPayload.conflict must be a string or a list, not int (7)"),
        (PostgresPayload(where=[1]), "PostgresPayload.where must be a mapping or None, not list ([1])"),
        (PostgresPayload(op=None), "PostgresPayload.op must be a string, not NoneType (None)"),
        (MongoPayload(filter="x"), "MongoPayload.filter must be a mapping or None, not str ('x')"),
        (HttpPayload(idempotency_key=7), "HttpPayload.idempotency_key must be a string, not int (7)"),
        (RedisPayload(ttl="5"), "RedisPayload.ttl must be a number or None, not str ('5')"),
        (RedisPayload(ttl=True), "RedisPayload.ttl must be a number or None, not bool (True)"),
        (CustomPayload(type=7), "CustomPayload.type must be a string, not int (7)"),
    ],
)
def test_a_field_of_a_payload_with_a_wrong_type_is_named(payload, said) -> None:
    check = build_type_check(type(payload))
    check(type(payload)())
    with pytest.raises(TypeError) as raised:
        check(payload)
    assert str(raised.value) == said
    with pytest.raises(TypeError):  # a second look is no milder
        check(payload)


def test_payloads_of_right_types_pass_and_subclasses_may_have_fields_of_their_own() -> None:
    class Own(CustomPayload, frozen=True):
        weight: NoSuchName = 1  # type: ignore[name-defined]  # noqa: F821

    for payload in (
        RedisPayload(key=b"k", ttl=5, data=object()),
        RedisPayload(ttl=0.5),
        PostgresPayload(conflict=("a", "b"), where={}),
        KafkaPayload(key="k"),
    ):
        build_type_check(type(payload))(payload)
    build_type_check(CustomPayload)(Own(type="own", weight="much"))


def test_values_that_a_class_lists_can_be_checked_without_its_sink() -> None:
    check_choices(PostgresPayload(op="upsert"))
    with pytest.raises(ValueError, match=r"PostgresPayload\.op must be one of 'insert', 'upsert'.*, not 'upsrt'"):
        check_choices(PostgresPayload(op="upsrt"))


class Delivering(Handler[bytes, Any]):
    """Delivers what it is given."""

    def __init__(self, **collected: Any) -> None:
        self.collected = collected

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult()) for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(**self.collected)


@pytest.mark.parametrize(
    ("collected", "said"),
    [
        ({"files": [FilePayload(path="good"), FilePayload(path=7)]}, "FilePayload.path must be a string, not int (7)"),
        ({"files": FilePayload(path="good")}, "CollectResult.files must be a list of FilePayload, not FilePayload"),
        ({"files": "good"}, "CollectResult.files must be a list of FilePayload, not str"),
        (
            {"kafka": [FilePayload(path="good")]},
            "CollectResult.kafka must be a list of KafkaPayload; it contains",
        ),
    ],
)
async def test_a_wrong_type_in_a_payload_is_the_hooks_letter_and_nothing_of_its_result_goes_out(
    rig, collected, said
) -> None:
    run = rig(Delivering(**collected), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.kind == LetterKind.HOOK
    assert said in letter.error
    assert run.files.payloads == []


# -- run_handler refuses what a sink would ------------------------------------------------------------------------

SINKS = {
    "filesystem": {"files": {"base_path": "out"}},
    "kafka": {"topic": {"topic": "results"}},
    "postgres": {"db": {"dsn": "postgresql://app@127.0.0.1/x"}},
    "redis": {"cache": {"url": "redis://127.0.0.1"}},
    "mongo": {"docs": {"uri": "mongodb://127.0.0.1", "database": "x"}},
    "http": {"api": {"url": "http://127.0.0.1/"}},
}
REFUSED = [
    ({"files": [FilePayload(path="../../etc/passwd", data=1)]}, "not below the base path"),
    ({"files": [FilePayload(data=1)]}, "is not a valid file name"),
    ({"kafka": [KafkaPayload(data={"made by": object()})]}, "which JSON cannot represent"),
    ({"postgres": [PostgresPayload(table="t", data={"a": 1}, op="upsrt")]}, "upsrt"),
    ({"postgres": [PostgresPayload(table="", data={"a": 1})]}, "table"),
    ({"redis": [RedisPayload(key="", data=1)]}, "key"),
    ({"mongo": [MongoPayload(collection="c", op="delete", filter={})]}, "filter"),
    ({"http": [HttpPayload(data=1, idempotency_key="a b\n")]}, "idempotency_key"),
]


@pytest.mark.parametrize(("collected", "said"), REFUSED)
def test_run_handler_refuses_a_payload_that_its_sink_would_refuse(collected, said) -> None:
    run = run_handler(Delivering(**collected), [b"x"], {"sinks": SINKS})
    (letter,) = run.dead_letters
    assert letter.kind == LetterKind.DELIVERY
    assert said in letter.error
    assert not any(run.payloads.values())


def test_run_handler_keeps_a_payload_that_its_sink_would_accept_as_it_was_returned() -> None:
    payload = PostgresPayload(table="t", data={"a": Decimal("1.5")}, op="upsert", conflict="a")
    run = run_handler(Delivering(postgres=[payload]), [b"x"], {"sinks": SINKS})
    assert run.payloads["postgres.db"] == [payload]
    assert run.dead_letters == []


def test_run_handler_checks_what_it_can_where_a_sinks_client_is_not_installed(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="asyncpg")

    monkeypatch.setattr("tidemill.sinks.build.importlib.import_module", absent)
    collected = {"postgres": [PostgresPayload(table="t", data={"a": 1}, op="upsrt")]}
    run = run_handler(Delivering(**collected), [b"x"], {"sinks": SINKS})
    (letter,) = run.dead_letters
    assert "PostgresPayload.op must be one of" in letter.error


def test_run_handler_refuses_a_handler_whose_hooks_cannot_be_called() -> None:
    class Yielding(Handler[bytes, Any]):
        async def arrange(self, messages, pending):
            yield ExecutorTask("t")

    with pytest.raises(HandlerError, match=r"Yielding\.arrange has a `yield`.*return a value instead"):
        run_handler(Yielding, [b"x"])
