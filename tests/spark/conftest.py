"""One Spark for all tests of this room that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.config.settings import SparkSettings
from tidemill.spark.session import Spark


@pytest.fixture(scope="session")
def spark() -> Iterator[Spark]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        spark = Spark(SparkSettings(), "tidemill-test", 2)
        spark.start()
        yield spark
        spark.stop()
