"""Engines work in the environment of their driver."""

from __future__ import annotations

import os

import pytest

from tidemill.spark.engine.environment import in_environment, list_environment, strip_environment

SPARKS = {
    "SPARK_LOCAL_DIRS": "/tmp/blocks",
    "PYSPARK_PYTHON": "python",
    "_PYSPARK_DRIVER_CONN_INFO_PATH": "/tmp/x",
    "PYTHON_UDF_BATCH_SIZE": "100",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "YES",
}


def test_a_driver_gives_all_but_what_pyspark_has_set_there() -> None:
    environ = {"HOME": "/", "PYTHONHASHSEED": "7", "SPARK_HOME": "/spark", "SPARK_BUFFER_SIZE": "65536"}
    assert list_environment({}, environ) == {"HOME": "/", "PYTHONHASHSEED": "7", "SPARK_HOME": "/spark"}


def test_a_driver_gives_what_the_configuration_of_spark_sets_for_workers() -> None:
    conf = {"spark.executorEnv.LEVEL": "2", "spark.executorEnv.HOME": "/own", "spark.master": "local"}
    assert list_environment(conf, {"HOME": "/"}) == {"HOME": "/own", "LEVEL": "2"}


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("/s/python/lib/pyspark.zip:/s/python/lib/py4j-0.10.9.9-src.zip:/s/jars/spark-core_2.13-4.3.0.jar", {}),
        ("/s/python/lib/pyspark.zip:/own:.", {"PYTHONPATH": "/own:."}),
    ],
)
def test_an_executor_keeps_its_own_variables(path: str, left: dict[str, str]) -> None:
    assert strip_environment({"HOME": "/", **SPARKS, "PYTHONPATH": path}) == {"HOME": "/", **left}


def test_the_variables_of_the_worker_are_back_after_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before = dict(os.environ)
    with in_environment({"PATH": "/bin", "OWN": "1"}):
        assert os.environ == {"PATH": "/bin", "OWN": "1"}
        os.environ["SET_BY_A_HOOK"] = "1"
    assert os.environ == before
    with in_environment(None):
        assert os.environ == strip_environment(before)
    assert os.environ == before
