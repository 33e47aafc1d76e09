"""Names of workers and clusters, and the ids made of them."""

from __future__ import annotations

import socket

import pytest

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.runtime.identity import EngineIdentity, cluster_name, find_worker_name, new_engine_id


def test_the_instance_id_is_group_worker_and_slot() -> None:
    assert EngineIdentity("w1", 3, new_engine_id(), "reports", 1).instance_id == "reports.w1.3"


def test_engine_ids_differ() -> None:
    assert new_engine_id() != new_engine_id()


def test_the_worker_name_comes_from_the_variable_that_the_settings_name() -> None:
    settings = Settings(worker_name_env="POD_NAME")

    assert find_worker_name(settings, {"POD_NAME": " pod-7 ", "WORKER_ID": "other"}) == "pod-7"


def test_without_the_variable_it_is_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1")

    assert find_worker_name(Settings(), {"WORKER_ID": ""}) == "host-1"


@pytest.mark.parametrize("name", ["a b", "ä", "a/b", "x" * 101, "a\nb"])
def test_a_name_that_kafka_does_not_take_is_refused_with_its_variable(name: str) -> None:
    with pytest.raises(ConfigError, match="change POD_NAME"):
        find_worker_name(Settings(worker_name_env="POD_NAME"), {"POD_NAME": name})


def test_a_host_name_that_kafka_does_not_take_is_refused_with_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "my host")

    with pytest.raises(ConfigError, match="set WORKER_ID to another name"):
        find_worker_name(Settings(), {})


def test_the_cluster_name_comes_from_its_variable_first() -> None:
    settings = Settings(cluster_name="blue", cluster_name_env="CLUSTER")

    assert cluster_name(settings, {"CLUSTER": "green"}) == "green"
    assert cluster_name(settings, {}) == "blue"
    assert cluster_name(Settings(), {}) == ""
