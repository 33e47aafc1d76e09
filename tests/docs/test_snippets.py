"""Everything that the documentation shows as code is run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.docs.snippets import PAGES, ROOT, Block, blocks
from tests.until import wait_until

from tidemill.config.loading import load_settings
from tidemill.runtime.broker import free_port

KNOWN = {"python", "yaml", "yaml triggers", "sh", "sh background", "text", "console", "json"}


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
            Path(block.file).write_text(block.code)
            monkeypatch.delitem(sys.modules, Path(block.file).stem, raising=False)
        if block.info == "python":
            code = compile("\n" * block.line + block.code, str(page), "exec")
            exec(code, {"__name__": "snippet"})
        elif block.info == "yaml":
            Path("snippet.yaml").write_text(block.code)
            assert yaml.safe_load(block.code)
            load_settings(Path("snippet.yaml"), environ={})


def wait_for_port(port: int) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(answers, what=f"a broker answers on port {port}", pause_seconds=0.2)


def shell(block: Block, folder: Path, env: dict[str, str], port: int) -> list[str]:
    code = block.code.replace("localhost:9092", f"localhost:{port}")
    return ["bash", "-euo", "pipefail", "-c", f"{code}\npwd > {folder}/.where"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", pages_with("sh"), ids=named)
def test_the_commands_of_a_page_work_in_order(page, tmp_path):
    port = free_port()
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TIDEMILL_KAFKA__BROKERS": f"localhost:{port}",
        "WORKER_ID": f"docs-{port}",
    }
    where = tmp_path
    background: list[tuple[Block, subprocess.Popen[bytes]]] = []
    try:
        for block in blocks(page):
            if block.file is not None:
                (where / block.file).write_text(block.code.replace("localhost:9092", f"localhost:{port}"))
            elif block.info == "sh" and not block.commands_of_ci:
                done = subprocess.run(
                    shell(block, tmp_path, env, port), cwd=where, env=env, timeout=120, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{page}:{block.line}\n{done.stdout}\n{done.stderr}"
                where = Path((tmp_path / ".where").read_text().strip())
            elif block.info == "sh background":
                command = block.code.strip().replace("tidemill broker", f"tidemill broker --port {port}")
                with open(tmp_path / f"background-{block.line}.log", "wb") as log:
                    process = subprocess.Popen(
                        ["bash", "-c", f"exec {command}"], cwd=where, env=env, stdout=log, stderr=log,
                        stdin=subprocess.DEVNULL, start_new_session=True,
                    )  # fmt: skip
                background.append((block, process))
                if command.startswith("tidemill broker"):
                    wait_for_port(port)  # as who follows the page waits for it to say that it is there
        for block, process in reversed(background):
            log_text = (tmp_path / f"background-{block.line}.log").read_text()
            assert process.poll() is None, f"{page}:{block.line} ended by itself\n{log_text}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, f"{page}:{block.line}\n{log_text}"
    finally:
        for _, process in background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
