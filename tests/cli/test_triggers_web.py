"""`tidemill triggers run` with its web UI and its recorder on, as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

from tests import prepared
from tests.cli.sites import Site
from tests.until import wait_until

from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.process.exitcode import ExitCode


def test_a_host_says_where_its_web_ui_is_and_leaves_a_recording(site: Site, tmp_path: Path) -> None:
    site.write("name: holds, classpath: mine.Holds")
    recordings = tmp_path / "recordings"
    host = site.host(TIDEMILL_DEBUG__ENABLED="true", TIDEMILL_DEBUG__PORT="0", TIDEMILL_DEBUG__DB_DIR=str(recordings))

    answers: list[tuple[int, str, str]] = []

    def find_address() -> str:  # of this list only: other tests run hosts of the same user
        answer = prepared.run_text(["status", "spec.yaml", "--json"], cwd=site.folder, env=site.env)
        answers.append((answer.returncode, answer.stdout, answer.stderr))
        found = json.loads(answer.stdout)["processes"] if answer.stdout else []
        return str(found[0].get("web") or "") if found and found[0]["healthy"] else ""

    wait_until(lambda: bool(find_address()), 90, what=lambda: f"{answers[-1]} {site.log}")
    address = find_address()
    assert address in site.log
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(address, timeout=60).read()
    base = re.sub(r"/\?key=.*", "", address)
    wait_until(lambda: json.load(opener.open(f"{base}/api/v1/streams", timeout=60))["rows"] != [], 60)
    [stream] = json.load(opener.open(f"{base}/api/v1/streams", timeout=60))["rows"]
    assert (stream["name"], stream["subscribers"]) == ("upstream", 1)
    series = wait_until(lambda: json.load(opener.open(f"{base}/api/v1/streams/series?stream=upstream", timeout=60)), 60)
    assert set(series) == {"at", "broadcast", "resolved", "advanced"}
    host.send_signal(signal.SIGTERM)
    assert host.wait(90) == ExitCode.OK
    kinds = [row.event.kind for row in Reader(recordings).find_events(EventQuery(task_id="holds"), None, 10).rows]
    assert kinds == ["trigger_ended", "trigger_started"]
