"""Parsers of several hosts share the files of DAGs; a host that lacks a file deactivates no DAG of the others."""

from __future__ import annotations

import pytest
from tests.store.dags import dag, encode, task

from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.dag_calls import ListDags
from tidemill.store.calls.service_calls import (
    BeginSession,
    ClaimFiles,
    EndSession,
    ListFileDifferences,
    ListFiles,
    RemoveFile,
    ReportFiles,
    StoreFile,
)
from tidemill.store.database import Database


@pytest.fixture
async def parsers(database: Database) -> list[int]:
    return [await database.call(BeginSession("parser", f"p{n}", "here", "boot", n)) for n in range(3)]


async def store(database: Database, session: int, name: str = "a") -> None:
    (path,) = await database.call(ClaimFiles(session, (f"{name}.py",)))
    file = StoreFile(path, "digest", structures=(encode(dag(task("t"), id=name)),), session=session)
    (stored,) = await database.call(file)
    assert not stored.refused


async def list_active(database: Database) -> list[str]:
    return [one.dag_id for one in (await database.call(ListDags())).rows]


async def test_a_file_is_read_by_one_live_parser(database: Database, parsers: list[int]) -> None:
    first, second, _ = parsers
    assert await database.call(ClaimFiles(first, ("b.py", "a.py"))) == ("a.py", "b.py")
    assert await database.call(ClaimFiles(second, ("a.py", "c.py"))) == ("c.py",)
    assert await database.call(ClaimFiles(first, ("a.py", "c.py"))) == ("a.py",)
    with pytest.raises(CallRefusedError, match="has the file"):
        await database.call(StoreFile("a.py", "digest", session=second))

    await database.call(EndSession(first))

    assert await database.call(ClaimFiles(second, ("a.py",))) == ("a.py",)
    with pytest.raises(CallRefusedError, match="has ended"):
        await database.call(ClaimFiles(first, ("b.py",)))


async def test_a_host_that_lacks_a_file_deactivates_no_dag_of_a_live_one(
    database: Database, parsers: list[int]
) -> None:
    first, second, third = parsers
    await store(database, first)

    assert not await database.call(RemoveFile("a.py", second))
    assert not await database.call(RemoveFile("a.py", third))
    assert await list_active(database) == ["a"]

    assert await database.call(RemoveFile("a.py", first))
    assert await list_active(database) == []


async def test_all_live_parsers_together_remove_the_file_of_one_that_has_ended(
    database: Database, parsers: list[int]
) -> None:
    first, second, third = parsers
    await store(database, first)
    await database.call(EndSession(first))

    assert not await database.call(RemoveFile("a.py", second))
    assert not await database.call(RemoveFile("a.py", second))
    assert await list_active(database) == ["a"]
    assert await database.call(RemoveFile("a.py", third))
    assert await list_active(database) == []


async def test_one_that_has_the_file_keeps_its_dags_when_its_parser_has_ended(
    database: Database, parsers: list[int]
) -> None:
    first, second, third = parsers
    await store(database, first)
    await database.call(EndSession(first))
    assert not await database.call(RemoveFile("a.py", second))

    assert await database.call(ClaimFiles(third, ("a.py",))) == ("a.py",)

    assert not await database.call(RemoveFile("a.py", second))
    assert await list_active(database) == ["a"]
    await database.call(EndSession(third))
    assert await database.call(RemoveFile("a.py", second)), "it is the only one, and lacks it"


async def test_a_parser_is_told_the_files_that_it_may_remove(database: Database, parsers: list[int]) -> None:
    first, second, third = parsers
    for session, name in ((first, "a"), (second, "b")):
        await store(database, session, name)

    async def list_removable(session: int) -> list[str]:
        return [file.path for file in await database.call(ListFiles(removable_by=session))]

    assert [await list_removable(session) for session in parsers] == [["a.py"], ["b.py"], []]
    await database.call(EndSession(first))
    assert await list_removable(third) == ["a.py"], "once all live parsers lack it"


async def test_the_files_of_a_parser_that_has_just_ended_are_kept_for_a_grace(
    database: Database, parsers: list[int]
) -> None:
    """Its host may be about to start it again: the only one that has the file is restarted."""
    first, second, third = parsers
    await store(database, first)
    await database.call(EndSession(first))

    for session in (second, third):
        assert not await database.call(RemoveFile("a.py", session, grace_us=60_000_000))
    assert await list_active(database) == ["a"]
    assert await database.call(RemoveFile("a.py", third, grace_us=0))


async def test_a_file_that_was_stored_without_a_parser_is_removed_only_if_all_hosts_lack_it(
    database: Database, parsers: list[int]
) -> None:
    await database.call(StoreFile("a.py", "digest", structures=(encode(dag(task("t"), id="a")),)))
    first, second, third = parsers
    assert not await database.call(RemoveFile("a.py", first))
    assert not await database.call(RemoveFile("a.py", second))
    assert await list_active(database) == ["a"]
    assert await database.call(RemoveFile("a.py", third))


async def test_differences_between_hosts_are_those_of_live_services_and_present_files(
    database: Database, parsers: list[int]
) -> None:
    first, second, third = parsers
    await store(database, first)
    await store(database, first, "b")
    assert {file.path for file in await database.call(ListFiles(not_of=second))} == {"a.py", "b.py"}
    assert await database.call(ListFiles(not_of=first)) == ()
    await database.call(ReportFiles(second, ("a.py", "unknown.py", "\0.py"), ("b.py",)))
    await database.call(ReportFiles(third, ("a.py",)))

    async def list_differences() -> list[tuple[str, str, int]]:
        return [(one.path, one.difference, one.session) for one in await database.call(ListFileDifferences())]

    lacks = [("a.py", "missing", second), ("a.py", "missing", third)]
    assert await list_differences() == [*lacks, ("b.py", "differs", second)]
    (before, _, _) = await database.call(ListFileDifferences())
    await database.call(ReportFiles(second, ("a.py", "b.py")))
    assert await list_differences() == [*lacks, ("b.py", "missing", second)]
    assert before in await database.call(ListFileDifferences()), "it has been so since the first report"
    await database.call(EndSession(second))
    assert await list_differences() == [("a.py", "missing", third)]
    await database.call(ReportFiles(third))
    assert await list_differences() == []
    with pytest.raises(CallRefusedError, match="has ended"):
        await database.call(ReportFiles(second))
