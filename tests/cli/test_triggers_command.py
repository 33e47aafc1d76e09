"""`tidemill triggers`, for real: a host in a process of its own, its signals, its socket and its store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from tests.prepared import TIDEMILL

from tidemill.runtime.process.exitcode import ExitCode


def test_a_host_stores_events_that_can_be_listed_while_it_runs_and_after_it(site):
    site.write("name: fires, classpath: mine.Fires", "name: late, classpath: mine.Fires, kwargs: {count: 2}")
    host = site.host()
    # The file is there before its tables are.
    site.until(lambda: "this host runs the list" in site.log and len(site.rows("events", "spec.yaml")) == 5)
    assert {row["name"]: (row["state"], row["events"]) for row in site.rows("list", "spec.yaml")} == {
        "fires": ("running", 3),
        "late": ("running", 2),
    }
    rows = site.rows("events", "spec.yaml", "--trigger", "fires", "--after", "0", "--limit", "1")
    assert [(row["sequence_index"], row["payload"]) for row in rows] == [(1, {"n": 1})]
    host.terminate()
    assert host.wait(60) == ExitCode.OK
    assert (site.folder / "cleaned-fires").exists()
    assert not (site.folder / "killed").exists()
    assert [row["reason"] for row in site.rows("list", "spec.yaml")] == ["shutdown", "shutdown"]
    header, first, *_ = site.ask("events", "spec.yaml").stdout.splitlines()
    assert header.split() == ["ID", "TRIGGER", "SEQ", "AGE", "PAYLOAD"]
    assert first.endswith('{"n":0}')
    assert header.index("PAYLOAD") == first.index('{"n":0}')
    lines = [json.loads(line) for line in site.log.splitlines() if '"event stored"' in line]
    assert sorted((line["trigger"], line["sequence"]) for line in lines) == [
        ("fires", 0), ("fires", 1), ("fires", 2), ("late", 0), ("late", 1)
    ]  # fmt: skip
    assert "Traceback" not in site.log


def test_a_host_ends_by_itself_when_nothing_is_left_to_run(site):
    site.write("name: fires, classpath: mine.Fires, kwargs: {then: end}")
    assert site.host().wait(60) == ExitCode.OK
    assert [row["state"] for row in site.rows("list", "spec.yaml")] == ["finished"]


def test_a_hangup_reads_the_list_again_and_a_wrong_list_changes_nothing(site):
    site.write("name: gone, classpath: mine.Fires", "name: stays, classpath: mine.Fires")
    host = site.host()
    site.until(lambda: "triggers started" in site.log)
    site.write("name: gone, classpath: mine.Fires", "nam: typo, classpath: mine.Fires")
    host.send_signal(signal.SIGHUP)
    site.until(lambda: site.log.count("the list of triggers is invalid; the old one stays in effect") == 1)
    site.write("name: gone, classpath: mine.Fires", "name: typo, classpath: mine.Fire")
    host.send_signal(signal.SIGHUP)
    site.until(lambda: site.log.count("the list of triggers is invalid; the old one stays in effect") == 2)
    site.write("name: stays, classpath: mine.Fires", "name: new, classpath: mine.Fires")
    host.send_signal(signal.SIGHUP)
    site.until(lambda: "the list of triggers was reloaded" in site.log)
    assert (site.folder / "killed").exists()
    states = {row["name"]: (row["state"], row["reason"]) for row in site.rows("list", "spec.yaml")}
    assert states == {"gone": ("cancelled", "user"), "stays": ("running", None), "new": ("running", None)}


def test_a_blocked_loop_is_named_with_its_trigger_and_stack(site):
    site.write("name: the-culprit, classpath: mine.Fires, kwargs: {then: block}")
    site.host(TIDEMILL_TRIGGERER__BLOCK_THRESHOLD_SECONDS="0.3")
    site.until(lambda: "the event loop is running again" in site.log)
    [line] = [json.loads(line) for line in site.log.splitlines() if "blocks the event loop" in line]
    assert (line["trigger"], line["cause"]) == ("the-culprit", "waiting")
    assert "time.sleep(1.5)" in line["stack"]


def test_streams_shows_who_holds_what(site):
    site.write("name: holds, classpath: mine.Holds", "name: holds-too, classpath: mine.Holds")
    host = site.host()
    site.until(
        lambda: (report := site.ask("streams", "spec.yaml")).returncode == 0 and "1 outstanding" in report.stdout
    )
    text = site.ask("streams", "spec.yaml").stdout
    assert f"process {host.pid}: 2 triggers, store open" in text
    assert "\nupstream: 2 subscribers, 1 outstanding" in text
    table = text.splitlines()[2:]
    assert table[0].split() == ["LANE", "OUTSTANDING", "OLDEST", "AGE", "HELD", "BY"]
    assert table[1].endswith("holds, holds-too")
    narrow = site.ask("streams", "spec.yaml", COLUMNS="40").stdout.splitlines()
    assert max(map(len, narrow)) <= 40
    assert narrow[-1].strip() == "holds, holds-too"
    [report] = site.rows("streams", "spec.yaml")
    assert report["streams"][0]["lanes"][0]["age_seconds"] > 0  # type: ignore[index]


def test_a_second_host_of_a_list_is_refused_and_told_what_to_do(site):
    site.write("name: fires, classpath: mine.Fires")
    first = site.host()
    site.until(lambda: "triggers started" in site.log)
    second = site.ask("run", "spec.yaml")
    assert second.returncode == ExitCode.CONFIG
    assert f"process {first.pid} on this machine already runs" in second.stderr
    first.kill()
    first.wait()
    third = site.host()  # one that was killed is in nobody's way
    site.until(lambda: site.log.count("triggers started") == 2)
    third.terminate()
    assert third.wait(60) == ExitCode.OK


def test_a_host_removes_events_that_are_old_enough(site):
    site.write("name: fires, classpath: mine.Fires")
    host = site.host()
    site.until(lambda: "triggers started" in site.log and len(site.rows("events", "spec.yaml")) == 3)
    host.terminate()
    assert host.wait(60) == ExitCode.OK
    site.write("name: late, classpath: mine.Fires, kwargs: {count: 0}")
    site.host(TIDEMILL_STORE__RETENTION_EVENTS_DAYS="0.00000001")
    site.until(lambda: "old rows were removed from the store" in site.log)
    assert [row for row in site.rows("events", "spec.yaml") if row["trigger"] == "fires"] == []


def test_asyncio_s_own_debugging_is_left_on(site):
    site.write("name: debugged, classpath: mine.Debugged, restart: never")
    assert site.host(PYTHONASYNCIODEBUG="1").wait(60) == ExitCode.OK
    assert [row["payload"] for row in site.rows("events", "spec.yaml")] == [True]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "nothing.yaml"), ExitCode.CONFIG, "the trigger list nothing.yaml does not exist"),
        (("run", "wrong.yaml"), ExitCode.CONFIG, "unknown key 'nam'; did you mean 'name'?"),
        (
            ("run", "misspelt.yaml"),
            ExitCode.CONFIG,
            "entry 1 (x): mine.Fire: the module 'mine' has no 'Fire'",
        ),
        (("check", "misspelt.yaml"), ExitCode.CONFIG, "did you mean mine.Fires?"),
        (("check", "nothing.yaml"), ExitCode.CONFIG, "nothing.yaml does not exist"),
        (("list", "nothing.yaml"), ExitCode.CONFIG, "nothing.yaml does not exist"),
        (("events", "nothing.yaml"), ExitCode.CONFIG, "nothing.yaml does not exist"),
        (("streams", "nothing.yaml"), ExitCode.CONFIG, "nothing.yaml does not exist"),
        (("run",), ExitCode.CONFIG, "Missing argument 'SPEC'"),
        (("streams", "spec.yaml"), ExitCode.REMOTE, "start one: tidemill triggers run spec.yaml"),
        (("list", "spec.yaml"), ExitCode.CONFIG, "tidemill triggers run"),
        (("events", "spec.yaml"), ExitCode.CONFIG, "tidemill triggers run"),
        (("events", "spec.yaml", "--after", "1" + "0" * 20), ExitCode.CONFIG, "--after"),
        (("events", "spec.yaml", "--limit", "1" + "0" * 20), ExitCode.CONFIG, "--limit"),
    ],
)
def test_what_a_careless_user_does_is_answered_with_what_to_do(site, words, code, said):
    site.write()
    (site.folder / "wrong.yaml").write_text("- {nam: x, classpath: a.B}")
    (site.folder / "misspelt.yaml").write_text("- {name: x, classpath: mine.Fire}")
    done = site.ask(*words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_list_is_checked_without_being_run(site):
    site.write("name: fires, classpath: mine.Fires, kwargs: {count: 5}", "name: holds, classpath: mine.Holds")
    good = site.ask("check", "spec.yaml")
    assert (good.returncode, good.stdout) == (0, "ok: spec.yaml, 2 triggers\n")
    assert not (site.folder / "tidemill.db").exists()
    (site.folder / "mine.py").write_text((site.folder / "mine.py").read_text() + "\nprint('imported')\n")
    loud = site.ask("check", "spec.yaml", "--json")
    assert json.loads(loud.stdout)["triggers"] == 2
    assert loud.stderr == "imported\n"
    site.write("name: fires, classpath: mine.Fires, kwargs: {conut: 5}")
    bad = site.ask("check", "spec.yaml", "--json")
    assert bad.returncode == ExitCode.CONFIG
    assert json.loads(bad.stdout)["problems"] == [
        "spec.yaml:1: entry 1 (fires): mine.Fires has no argument 'conut'; did you mean count?"
    ]


def test_an_unknown_trigger_is_said_to_be_unknown(site):
    site.write("name: fires, classpath: mine.Fires, kwargs: {then: end}")
    site.host().wait(60)
    done = site.ask("events", "spec.yaml", "--trigger", "fire")
    assert done.returncode == ExitCode.CONFIG
    assert "has no trigger 'fire'" in done.stderr


def test_a_table_has_one_line_of_plain_text_for_each_row_and_stops_when_nobody_reads_on(site):
    site.write("name: odd, classpath: mine.Odd, restart: never")
    site.host().wait(60)

    header, row = site.ask("list", "spec.yaml").stdout.splitlines()
    error = row[header.index("REASON OR ERROR") :]
    assert error.startswith("KeyError: 'lastlast")
    assert len(error) < 300
    narrow = site.ask("list", "spec.yaml", COLUMNS="40").stdout.splitlines()
    assert max(map(len, narrow)) <= 40
    assert narrow[0].split() == ["NAME", "STATE", "EVENTS", "AGE"]
    assert "\x1b" not in site.ask("events", "spec.yaml", "--limit", "3").stdout

    command = [sys.executable, "-c", TIDEMILL, "triggers", "events", "spec.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=site.folder, env=site.env, **pipes) as events:
        events.stdout.readline()
        events.stdout.close()
        assert events.stderr.read() == b""
        assert events.wait(60) == ExitCode.OK


def test_a_trigger_whose_task_exits_fails_alone(site):
    site.write(*(f"name: {name}, classpath: mine.{name.title()}, restart: never" for name in ("leaves", "debugged")))
    assert site.host().wait(60) == ExitCode.OK
    found = {row["name"]: (row["state"], row["events"], row["error"]) for row in site.rows("list", "spec.yaml")}
    assert found["debugged"] == ("finished", 1, None)
    assert found["leaves"][:2] == ("failed", 0)
    assert "a task or callback of the trigger raised SystemExit: 5" in found["leaves"][2]
