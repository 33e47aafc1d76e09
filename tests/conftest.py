"""What all tests share: the options, and no endpoint for metrics and no recordings but in their own tests."""

from __future__ import annotations

import ast
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests import size
from tests.archives import use_broker_archive
from tests.costs import Costs
from tests.servers import Servers

from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.testing.kafka import new_broker

# Where nothing configures the log, tracebacks are plain: a rich one, with all locals, costs half a second of CPU.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# For processes that tests start; it is read from the environment with the rest of the configuration.
os.environ.setdefault("TIDEMILL_METRICS__ENABLED", "false")
os.environ.setdefault("TIDEMILL_DEBUG__ENABLED", "false")

# Where tests run under `nohup`, or behind a shell, what they start would ignore the end of its terminal, or Ctrl-C.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

use_broker_archive()


def parse_one_at_a_time() -> None:
    """Let no two threads parse a module at the same time, as pytest does with each that it imports.

    Python 3.11 counts the depth of a tree per process. If a search for garbage lets another thread parse meanwhile, one
    of them fails: SystemError: AST constructor recursion depth mismatch.
    """
    lock, parse = threading.RLock(), ast.parse

    @functools.wraps(parse)
    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    ast.parse = parse_alone


if sys.version_info < (3, 12):
    parse_one_at_a_time()

#: What a test that starts whole pipelines may take beside others; other tests: see pyproject.toml.
LONG_SECONDS = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` too, at full length")
    parser.addoption("--nightly", action="store_true", help="as --long, with large proofs at full size (tests/size.py)")
    parser.addoption("--workers", type=int, default=0, help="how many files of tests run side by side")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        size.nightly = config.option.long = True
    examples = size.sized(30, 60)
    # How long an example takes on a machine that is busy with other tests says nothing.
    too_slow = [HealthCheck.too_slow]
    settings.register_profile("busy", max_examples=examples, deadline=None, suppress_health_check=too_slow)
    settings.load_profile("busy")
    Servers.use_given()
    if config.getoption("--workers") and not config.option.collectonly:
        from tests import prepared
        from tests.side_by_side import SideBySide

        prepared.start_server()
        config.pluginmanager.register(SideBySide(config.getoption("--workers"), Servers.start()))
    else:
        config.pluginmanager.register(Costs())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {"nightly"} if not config.getoption("--nightly") else set()
    if not config.getoption("--long"):
        left_out.add("long")
    else:
        for item in items:
            lasts = item.get_closest_marker("long") or item.get_closest_marker("nightly")
            if lasts and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        gone = set(deselected)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """Run migrations once, prepare the command line once, and leave what all share out of every search for garbage."""
    if (migrate := sys.modules.get("tidemill.store.migrate")) is not None:
        from tests.store.migrated import repeat_migrations

        migrate._run_alembic = repeat_migrations(migrate._run_alembic)
    if (testing := sys.modules.get("typer.testing")) is not None:
        testing._get_command = functools.cache(testing._get_command)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # most of what tests allocate is freed without it


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Tell whether durations and counts are to be those of the full run."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def embedded_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """Return the broker of the run, or one of this process, as users have it; do not stop it (see `own_kafka`)."""
    if Servers.shared is not None:
        yield Servers.shared.broker
        return
    with new_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="session", autouse=True)
def _recordings_are_written_to_their_end() -> None:
    """Let a recording be sealed at its end however busy the machine is; its own tests say how long that may take."""
    from tidemill.recorder.writing import disk_recording, writer

    writer.END_SECONDS = 60.0
    disk_recording.END_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _log_is_not_configured() -> Iterator[None]:
    """Forget what a test has configured: any file of tests may be the next one of a process."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
    if (user_code := sys.modules.get("tidemill.runtime.log.user_code")) is not None:
        user_code._build_code_paths.cache_clear()  # the folder that was the current one
