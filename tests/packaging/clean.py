"""Clean environments: a virtual environment, a home and a PATH in which nothing of this checkout can be found."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: What decides how packages and certificates are reached from here; everything else is left behind.
_KEPT = re.compile(r"(PIP_|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$|LANG$|LC_|TMPDIR$|\w+_proxy$)", re.IGNORECASE)
_JAVA = re.compile(r"(java|javac|jshell|keytool|mvn|mvnDebug|gradle|spark-submit|spark-class|pyspark|tidemill)$")


class CleanEnvironment:
    """A virtual environment with a home of its own, whose name is not plain, where no Java is on the PATH.

    Args:
        folder: An empty folder for all of it.
        has_pip: Whether packages can be installed.
    """

    def __init__(self, folder: Path, *, has_pip: bool = True) -> None:
        """Make it."""
        self.home, self.venv, programs = folder / "höme folder", folder / "venv", folder / "programs"
        for path in (self.home, programs):
            path.mkdir(parents=True)
        _link_programs(programs)
        options = [] if has_pip else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *options, self.venv], check=True, timeout=300)
        self.environ = {name: value for name, value in os.environ.items() if _KEPT.match(name)} | {
            "HOME": str(self.home),
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{programs}",
            # The user's own: what was downloaded or built before is not downloaded or built again.
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip"),
        }

    def run(self, *command: str | Path, cwd: Path | None = None, seconds: float = 300, stdin: str = "") -> str:
        """Run a command that must end well, and return what it printed."""
        done = subprocess.run(
            command,
            cwd=cwd or self.home,
            env=self.environ,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def pip_install(self, *arguments: str | Path) -> None:
        """Install packages; what is never imported is never compiled."""
        options = ("--quiet", "--no-input", "--no-compile")
        self.run(self.venv / "bin" / "python", "-m", "pip", "install", *options, *arguments, seconds=900)


def lend(package: str, venv: Path) -> None:
    """Put a package of this environment into another one, whose pip finds it there.

    It is for what takes most of the time of an installation; scripts/install has installed it here from the same lock.
    """
    distribution = importlib.metadata.distribution(package)
    (target,) = venv.glob("lib/python*/site-packages")
    source = Path(str(distribution.locate_file("")))
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:  # programs have this environment in their first line
            continue
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / file, target / file)
        except OSError:  # another file system
            shutil.copy2(source / file, target / file)


def list_pins(*locks: Path) -> Sequence[str]:
    """Return the lines `name==version` of lock files, markers included and hashes left out."""
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    return [line.removesuffix("\\").strip() for line in lines if re.match(r"\w", line)]


def _link_programs(folder: Path) -> None:
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        # What is beside a Python belongs to that Python.
        if not Path(place).is_dir() or list(Path(place).glob("activate")) or "shims" in place:
            continue
        for program in Path(place).iterdir():
            if not _JAVA.match(program.name):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
