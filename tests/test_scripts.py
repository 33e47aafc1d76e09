"""The shell functions behind the scripts: every step is run and told, and one failure fails the whole."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def bash(script: str) -> tuple[int, str]:
    """Run a script after sourcing the functions, with stdin closed and without a terminal."""
    done = subprocess.run(
        ["bash", "-c", f"exec <&-; set -euo pipefail; source {SCRIPTS}/lib.sh\n{script}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


def test_a_failed_step_does_not_stop_the_next_and_fails_the_whole() -> None:
    code, output = bash('step one true; step "two words" false; step three echo told; verdict')
    assert code == 1
    assert "1. one" in output
    assert "two words: FAILED (exit code 1)" in output
    assert "told" in output
    assert output.splitlines()[-1].endswith("two words")


def test_each_file_of_tests_is_in_one_group_at_full_length() -> None:
    text = (SCRIPTS / "test").read_text()
    functions = "\n".join(re.findall(r"^(?:full_length|groups?)\(\) \{$.*?^\}$", text, re.DOTALL | re.MULTILINE))
    code, output = bash(f"""
        step() {{ shift; "$@"; }}
        beside() {{ shift; "$@"; }}
        joined() {{ :; }}
        pytest() {{ printf 'group'; printf ' %s' "$@"; printf '\\n'; }}
        cd {SCRIPTS.parent}
        {functions}
        long=(--long)
        full_length
    """)
    assert code == 0, output
    groups = [line.split() for line in output.splitlines() if line.startswith("group ") and "not alone" in line]
    root = SCRIPTS.parent

    def includes(group: list[str], file: str) -> bool:
        named = [word for word in group if word.startswith("tests/")]
        ignored = [word.partition("=")[2] for word in group if word.startswith("--ignore=")]
        globs = [word.partition("=")[2] for word in group if word.startswith("--ignore-glob=")]
        within = [name for name in named or ["tests"] if file == name or file.startswith(f"{name}/")]
        left_out = any(file == name or file.startswith(f"{name}/") for name in ignored)
        return bool(within) and not left_out and not any(fnmatch.fnmatch(file, each) for each in globs)

    files = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    counts = {file: sum(includes(group, file) for group in groups) for file in files if file[:11] != "tests/core/"}
    assert {file: count for file, count in counts.items() if count != 1} == {}


def test_a_step_that_cannot_run_fails() -> None:
    code, output = bash("step missing no-such-program; verdict")
    assert code == 1
    assert "missing: FAILED (exit code 127)" in output


def test_steps_that_all_work_end_well() -> None:
    code, output = bash("step one true; step two true; verdict")
    assert code == 0
    assert "all 2 steps ok" in output


def test_commands_run_beside_the_steps_and_each_tells_its_output_and_its_failure() -> None:
    code, output = bash(
        'gate=$(mktemp -u); mkfifo "$gate"; beside left bash -c "cat $gate; exit 3"; beside right echo quick; '
        'step middle bash -c "echo opened >$gate"; joined; beside late echo again; joined; verdict'
    )
    assert code == 1
    assert "opened\n    left: FAILED (exit code 3)" in output
    assert "quick\n    right: ok" in output
    assert "again\n    late: ok" in output
    assert output.splitlines()[-1].endswith(" s: left")


def test_no_more_run_beside_than_there_is_room_for() -> None:
    code, output = bash(
        "folder=$(mktemp -d); MOST_BESIDE=2; "
        "look() { touch $folder/$1; ls $folder; command sleep 0.5; rm $folder/$1; }; "
        "for n in 1 2 3 4; do beside $n look $n; done; joined"
    )
    assert code == 0, output
    seen = re.split(r"==> \d\. \d\n", output)[1:]
    assert max(len(re.findall(r"^\d$", each, re.MULTILINE)) for each in seen) <= 2
    assert output.count(": ok, ") == 4


def test_the_time_of_what_ran_beside_a_longer_step_is_its_own() -> None:
    code, output = bash("beside short echo told; step long sleep 2.5; joined")
    assert code == 0
    (seconds,) = re.findall(r"short: ok, (\d+) s", output)
    assert int(seconds) <= 1


def test_a_quiet_command_shows_its_output_only_when_it_fails() -> None:
    code, output = bash('quietly "making tea" echo hidden')
    assert code == 0
    assert re.fullmatch(r"\.\.\. making tea\n    done in \d+ s\n", output)
    code, output = bash('quietly "making tea" bash -c "echo because; exit 3"; echo not reached')
    assert code == 1
    assert "because" in output
    assert "error: making tea failed (exit code 3)" in output
    assert "not reached" not in output


def test_a_long_last_line_of_a_quiet_command_is_cut() -> None:
    # Time flies: only what goes on for long is told of.
    flying = "sleep() { SECONDS=$((SECONDS + 20)); command sleep 0.1; }"
    code, output = bash(f'{flying}; quietly slow bash -c "printf %0999d 1; command sleep 1"')
    assert code == 0
    assert " s: 0000" in output
    assert max(map(len, output.splitlines())) < 100


def test_progress_without_a_terminal_names_whole_packages() -> None:
    names = ", ".join(f"package-{number}" for number in range(200, 400))
    lines = {
        "  Downloading https://index.example/a/b/pip-26.0.tar.gz (1 MB)": "Downloading pip-26.0.tar.gz (1 MB)",
        f"  Downloading package-1.2-cp311-{'manylinux_x86_64.' * 4}whl (1 MB)": "Downloading package-1.2 (1 MB)",
        "Collecting aiohttp==3.14.5 (from -r requirements.lock (line 7))": "Collecting aiohttp==3.14.5",
        f"Installing collected packages: {names}": "Installing collected packages: package-200, package-201, ...",
    }
    for line, shown in lines.items():
        _, output = bash(f"printf '%s\\n' {shlex.quote(line)} | shortened")
        assert output == shown + "\n"
    flying = "sleep() { SECONDS=$((SECONDS + 20)); command sleep 0.1; }"
    script = f"show() {{ echo {shlex.quote(line)}; command sleep 1; }}; {flying}; quietly slow show"
    _, output = bash(script)
    assert " s: Installing collected packages: package-200," in output


def test_a_picture_shows_each_line_for_as_long_as_the_terminal_did_and_ends_with_the_last_screen() -> None:
    spec = importlib.util.spec_from_file_location("picture", SCRIPTS / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = picture  # its dataclass looks for its own module
    spec.loader.exec_module(picture)

    def show(*texts: str) -> list[object]:
        return [((0, text, "#fff", False),) if text else () for text in (*texts, *[""] * (picture.ROWS - len(texts)))]

    screens = [(0.0, show("a < b", "one")), (0.5, show("a < b", "one")), (60.0, show("a < b", "two"))]
    kept = picture.shorten(screens)
    assert [at for at, _ in kept] == [0.0, picture.PAUSE_SECONDS]
    versions = picture.list_versions(kept)
    end = picture.PAUSE_SECONDS + picture.END_SECONDS
    shown = [(v.row, v.line[0][1], v.since, v.until) for v in versions]
    assert shown == [(0, "a < b", 0.0, end), (1, "one", 0.0, 1.0), (1, "two", 1.0, end)]
    svg = ElementTree.fromstring(picture.draw(versions, "a & b"))
    texts = {"".join(each.itertext()): each.get("class") for each in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert texts == {"$ a & b": None, "a < b": None, "one": "a1", "two": "a2"}
    style = "".join(svg.find("{http://www.w3.org/2000/svg}style").itertext())  # type: ignore[union-attr]
    assert ".a1{animation-name:k1;visibility:hidden}" in style
    assert ".a2{animation-name:k2}" in style


def test_a_missed_bar_of_the_triggers_stops_no_measurement_and_fails_the_whole(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "bench", tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    programs = {tmp_path / "scripts/install": "exit 0", python: 'echo "$2"; [[ $2 != bench.shared_stream ]]'}
    for path, line in programs.items():
        path.write_text(f"#!/usr/bin/env bash\n{line}\n")
        path.chmod(0o755)
    done = subprocess.run([tmp_path / "scripts/bench", "triggers"], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["bench.shared_stream", "bench.shared_stream_memory", "bench.trigger_host"]
    assert done.returncode == 1


def test_the_scripts_can_be_started() -> None:
    for script in ("install", "demo", "test", "lock", "picture", "../.ci/run"):
        path = SCRIPTS / script
        assert os.access(path, os.X_OK), script
        assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_an_installation_without_python_says_what_to_do(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "cat", "cksum"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "scripts").mkdir()
    for name in ("install", "lib.sh"):
        (tmp_path / "scripts" / name).write_text((SCRIPTS / name).read_text())
    for name in ("requirements-dev.lock", "requirements-java.lock", "pyproject.toml"):
        (tmp_path / name).write_text("")
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "install"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr


def test_the_part_of_the_time_is_told_in_which_the_processors_were_busy() -> None:
    code, output = bash('read_processors; find_busy "$(echo 0 0)"')
    assert code == 0
    busy, idle, percent = map(int, output.split())
    assert percent == pytest.approx(100 * busy / (busy + idle), abs=2)
