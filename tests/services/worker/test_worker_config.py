from __future__ import annotations

from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.services.worker.worker_session import read_config


def test_an_attempt_may_import_for_twice_as_long_as_the_parser() -> None:
    settings = Settings.model_validate({"dags": {"parse_timeout_seconds": 120}})
    assert read_config(settings, Path("dags")).limits.import_seconds == 240
