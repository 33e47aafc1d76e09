"""`tidemill dev` over PostgreSQL, from the command line to the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.dags.conftest import DevSite
from tests.store.conftest import own_postgres, postgres
from tests.store.server import PostgresServer
from tests.until import wait_until

from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.table import find_descendants, is_running

__all__ = ["own_postgres", "postgres"]

KEY = "cw_0x689RpI-jtRR7oE8h_eQsKImvJapLeSbXpwF4e4="


@pytest.fixture
async def dev(tmp_path: Path, postgres):
    site = DevSite(tmp_path)
    site.env |= {"TIDEMILL_STORE__URL": await postgres.new_database(), "TIDEMILL_STORE__ENCRYPTION_KEY": KEY}
    yield site
    site.close()


@pytest.mark.long
def test_a_second_dev_is_refused_and_the_next_after_a_kill_continues_at_once_and_all_can_be_read_without_it(dev):
    process = dev.start()
    dev.run("variables", "set", "seconds", "5")
    dev.run("dags", "trigger", "long")
    wait_until(lambda: dev.states("long") == {"sleeps": "running"}, what=lambda: dev.log)

    done = dev.run("dev")

    assert done.returncode == ExitCode.CONFIG
    assert f"in use by `tidemill dev` as process {process.pid} on" in done.stderr
    assert process.poll() is None
    run = dev.rows("dags", "trigger", "story", "--conf", '{"rows": 7}', "--wait")[0]
    assert run["state"] == "success", "the first one goes on"
    xcoms = {row["task"]: row["value"] for row in dev.rows("tasks", "xcoms", "story")}
    assert xcoms == {"first": 7, "second": 8, "waits": "resumed"}
    assert [row["text"] for row in dev.rows("tasks", "logs", "story", "first")] == ["the first task"]

    dev.run("variables", "set", "seconds", "60")
    run = dev.rows("dags", "trigger", "long")[0]["run"]
    wait_until(lambda: dev.states("long") == {"sleeps": "running"}, what=lambda: dev.log)
    dev.run("variables", "set", "seconds", "0")
    tree = find_descendants(process.pid)
    process.kill()
    process.wait()
    dev.start()
    assert "waiting to see whether it still runs" not in dev.log
    wait_until(lambda: dev.rows("runs", "show", "long", run)[0]["state"] == "success", what=lambda: dev.log)
    history = dev.rows("tasks", "history", "long", "sleeps", "--run", run)
    assert "lost" in [row["input"].split()[0] for row in history]
    wait_until(lambda: not any(map(is_running, tree)), 60, what="the end of all processes of the first")

    tree = find_descendants(dev.process.pid)
    assert dev.stop() == ExitCode.OK
    wait_until(lambda: not any(map(is_running, tree)), 60, what="the end of all processes")
    assert dev.rows("runs", "list", "story")[0]["state"] == "success"
    assert not list(dev.folder.glob("dags.db*")), "nothing is written beside the folder"


async def test_secrets_are_encrypted_with_the_configured_key(dev, postgres):
    assert dev.run("connections", "set", "db", "--type", "postgres", "--password", "hunter2").returncode == 0
    import asyncpg

    connection = await asyncpg.connect(dev.env["TIDEMILL_STORE__URL"])
    value = await connection.fetchval("SELECT value FROM connection")
    await connection.close()

    assert "hunter2" not in value
    assert "hunter2" not in json.dumps(dev.rows("connections", "list"))


@pytest.mark.long  # tests/store has it of a store
async def test_a_server_that_is_away_for_a_while_costs_no_task_and_without_a_key_secrets_lie_readable(
    tmp_path: Path, own_postgres: PostgresServer
):
    site = DevSite(tmp_path)
    site.env |= {"TIDEMILL_STORE__URL": await own_postgres.new_database()}
    try:
        began, go = site.add_gated()
        process = site.start()
        wait_until(lambda: "store.encryption_key is not set" in site.log, what=lambda: site.log)
        wait_until(lambda: site.run("dags", "trigger", "gated", "--run", "today").returncode == 0)
        wait_until(began.exists, what=lambda: site.log)

        own_postgres.stop("immediate")
        wait_until(lambda: "cannot be reached" in site.log, what=lambda: site.log)
        go.touch()  # it ends while nobody can be told
        own_postgres.start()

        wait_until(lambda: site.rows("runs", "show", "gated", "today")[0]["state"] == "success", what=lambda: site.log)
        history = [row["input"].split()[0] for row in site.rows("tasks", "history", "gated", "waits")]
        assert history.count("claim") == 1, history
        assert process.poll() is None
        assert site.rows("dags", "trigger", "story", "--wait")[0]["state"] == "success", site.log
        assert site.stop() == ExitCode.OK
    finally:
        site.close()
