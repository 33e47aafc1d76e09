"""One Spark for the tests of a module: a process can have only one, and some tests start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.config.settings import SparkSettings
from tidemill.spark.session.session import Spark

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def spark() -> Iterator[Spark]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{Path(__file__).parent}")
        spark = Spark(SparkSettings(), "tidemill-test", 2)
        spark.start()
        yield spark
        spark.stop()
