"""Until a command configures its logs, standard output stays free for its results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

START = (
    "import sys\n"
    "from tidemill.runtime.log.startup import log_to_stderr\n"
    "def configure_logs():\n"
    "    from tidemill.config.settings import LoggingSettings\n"
    "    from tidemill.runtime.log.setup import configure\n"
    "    configure(LoggingSettings(level='WARNING'))\n"
)
LOG = (
    "import structlog\n"
    "log = structlog.get_logger('some.module')\n"
    "bound = log.bind(topic='t')\n"
    "log.debug('a'); log.info('b')\n"
    "bound.warning('c', password='hunter2')\n"
    "try: 1 / 0\n"
    "except ZeroDivisionError: log.exception('d')\n"
    "bound.info('e'); bound.error('f')\n"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "code",
    [f"{START}log_to_stderr(configure_logs)\n{LOG}", f"import structlog\n{START}log_to_stderr(configure_logs)\n{LOG}"],
)
def test_warnings_and_worse_go_to_stderr_in_the_usual_form_whenever_structlog_is_imported(code: str) -> None:
    done = run(code)

    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout) == (0, "")
    assert [(entry["event"], entry["level"]) for entry in entries] == [("c", "warning"), ("d", "error"), ("f", "error")]
    assert (entries[0]["logger"], entries[0]["topic"], entries[0]["password"]) == ("some.module", "t", "***")
    assert "ZeroDivisionError" in entries[1]["exception"]


def test_what_configures_the_logs_later_is_followed() -> None:
    done = run(
        f"{START}log_to_stderr(configure_logs)\n"
        "import structlog\n"
        "from tidemill.config.settings import LoggingSettings\n"
        "from tidemill.runtime.log.setup import configure\n"
        "from tidemill.runtime.log.startup import is_waiting\n"
        "log = structlog.get_logger()\n"
        "before = is_waiting()\n"
        "configure(LoggingSettings(level='INFO'))\n"
        "print(before, is_waiting())\n"
        "log.info('shown')\n"
    )

    assert done.stdout == "True False\n"
    assert json.loads(done.stderr)["event"] == "shown"


def test_an_error_before_the_logs_are_configured_is_one_plain_line() -> None:
    done = run(
        f"{START}log_to_stderr(configure_logs)\n"
        "from tidemill.core.errors import RemoteError\n"
        "from tidemill.runtime.log.setup import tell_failure\n"
        "tell_failure('it failed', RemoteError('the broker is gone'))\n"
    )

    assert (done.stdout, done.stderr) == ("", "error: the broker is gone\n")


def test_an_application_that_has_configured_structlog_keeps_it() -> None:
    done = run(
        f"{START}import structlog\n"
        "structlog.configure(processors=[structlog.processors.JSONRenderer()])\n"
        "log_to_stderr(configure_logs)\n"
        "structlog.get_logger().info('mine')\n"
    )

    assert json.loads(done.stdout) == {"event": "mine"}
