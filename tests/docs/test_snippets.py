"""Everything that the documentation shows as code is run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from tests import prepared, size
from tests.archives import find_spark_archive
from tests.docs.own_network import with_free_port
from tests.docs.snippets import PAGES, ROOT, Block, blocks
from tests.store.conftest import postgres
from tests.store.server import PostgresServer
from tests.until import wait_until

from tidemill.config.loading import load_settings
from tidemill.runtime.embedded.jars import kafka_classpath
from tidemill.runtime.files.folders import user_cache_folder
from tidemill.spark.session.conf import QUICK_JVM

__all__ = ["postgres"]

KNOWN = {"python", "yaml", "yaml triggers", "sh", "sh background", "text", "console", "json"}


#: Pages whose commands start Spark or `tidemill dev` several times.
#: Their commands are tested as such, too; what the README starts and sends, the tutorial does as well.
SLOW = {
    *("README.md", "process-a-dataframe.md", "backfill-a-topic.md", "redrive-dead-letters.md"),
    *("backfill-by-logical-date.md", "defer-by-hand.md", "keep-secrets.md"),
    *("run-on-postgresql.md", "keep-programs-alive.md", "wait-with-sensors.md"),
}
#: Pages whose commands start, with `--nightly`, as a reader starts them; those of other pages are forks.
READERS = {"README.md", "tutorial.md", "tutorial-dags.md"}


def pages_with(*infos: str) -> list[Path]:
    return [page for page in PAGES if any(block.info in infos for block in blocks(page))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is_and_every_link_leads_somewhere(page):
    assert {block.info for block in blocks(page)} <= KNOWN
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", pages_with("python", "yaml"), ids=named)
def test_python_runs_and_yaml_is_a_valid_configuration(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # blocks may import files of their page
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).parent.mkdir(exist_ok=True)
            monkeypatch.syspath_prepend(tmp_path / Path(block.file).parent)
            Path(block.file).write_text(block.code)
            monkeypatch.delitem(sys.modules, Path(block.file).stem, raising=False)
        if block.info == "python":
            code = compile("\n" * block.line + block.code, str(page), "exec")
            exec(code, {"__name__": "snippet"})
        elif block.info == "yaml":
            Path("snippet.yaml").write_text(block.code)
            assert yaml.safe_load(block.code)
            load_settings(Path("snippet.yaml"), environ={})


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_tests() -> None:
    """Let a process that is about to be executed be killed when its page's thread ends, or is killed with the tests."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_spark_defaults(folder: Path) -> Path:
    """Let the JVM of a session that a page makes itself start as fast as one of a pipeline."""
    archive = find_spark_archive()
    options = [*QUICK_JVM, *([f"-XX:SharedArchiveFile={archive}"] if archive is not None else [])]
    (folder / "spark-defaults.conf").write_text(f"spark.driver.defaultJavaOptions {' '.join(options)}\n")
    return folder


class PageRun:
    """The commands of a page in a folder, as a reader types them, with nothing of ours in the environment."""

    def __init__(self, page: Path, folder: Path, full: bool) -> None:
        self.page = page
        self.folder = folder
        self.where = folder
        self.background: list[tuple[Block, prepared.Forked | subprocess.Popen[bytes]]] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        # What runs leave in a home is not left in that of whoever runs tests; what was downloaded is found.
        (folder / ".home").mkdir()
        # Two test runs on this machine are two machines to Kafka.
        self.env = {
            **clean,
            "HOME": str(folder / ".home"),
            "XDG_CACHE_HOME": str(user_cache_folder().parent),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "WORKER_ID": f"docs-{os.getpid()}",
        }
        if any("SparkSession" in block.code for block in blocks(page)):
            self.env["SPARK_CONF_DIR"] = str(write_spark_defaults(folder / ".home"))
        # Full ones are those of a reader in everything.
        self.forks = () if full else (prepared.write_stand_in(folder / ".home"),)

    def run(self) -> None:
        for block in blocks(self.page):
            if block.file is not None:
                (self.where / block.file).parent.mkdir(exist_ok=True)
                (self.where / block.file).write_text(block.code)
            elif block.info == "sh" and not block.commands_of_ci:
                self.run_to_its_end(block)
            elif block.info == "sh background":
                self.start(block)
        for block, process in reversed(self.background):
            assert process.poll() is None, f"{self.page}:{block.line} ended by itself\n{self.log(block)}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, f"{self.page}:{block.line}\n{self.log(block)}"

    def run_to_its_end(self, block: Block) -> None:
        path = f'PATH="{self.folder}/.home:$PATH"\n' if self.forks else ""
        code = f"{path}{block.code}\npwd > {self.folder}/.where"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code], cwd=self.where, env=self.env, timeout=300, capture_output=True,
            text=True, errors="replace", stdin=subprocess.DEVNULL, pass_fds=self.forks, preexec_fn=end_with_tests,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.page}:{block.line}\n{done.stdout}\n{done.stderr}"
        self.where = Path((self.folder / ".where").read_text().strip())

    def start(self, block: Block) -> None:
        command = block.code.strip()
        process: prepared.Forked | subprocess.Popen[bytes]
        with open(self.log_path(block), "wb") as log:
            if self.forks and command.startswith("tidemill "):
                process = prepared.start(
                    shlex.split(command)[1:], cwd=self.where, env=self.env, stdout=log, stderr=log,
                    code=f"import os; os.setsid(); {prepared.TIDEMILL}", network_of=threading.get_native_id(),
                )  # fmt: skip
            else:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {command}"], cwd=self.where, env=self.env, stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_tests,
                )  # fmt: skip
        self.background.append((block, process))
        if command.startswith("tidemill broker"):
            # As a reader waits for it to say that it is there.
            wait_until(lambda: "Kafka is ready" in self.log(block), what=lambda: self.log(block), pause_seconds=0.1)

    def log_path(self, block: Block) -> Path:
        return self.folder / f"background-{block.line}.log"

    def log(self, block: Block) -> str:
        return self.log_path(block).read_text()

    def kill(self) -> None:
        for _, process in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for fd in self.forks:
            os.close(fd)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page.name in SLOW else ()) for page in pages_with("sh")],
    ids=named,
)
def test_the_commands_of_a_page_work_in_order(page, tmp_path, request):
    kafka_classpath()  # the network of a page reaches no further than this machine
    run = PageRun(page, tmp_path, full=size.nightly and page.name in READERS)
    if any("$DATABASE_URL" in block.code for block in blocks(page)):
        server: PostgresServer = request.getfixturevalue("postgres")
        run.env["DATABASE_URL"] = asyncio.run(server.new_database())
    try:
        with_free_port(run.run)
    finally:
        run.kill()
