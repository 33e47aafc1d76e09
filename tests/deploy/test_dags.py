"""The manifests of DAGs on many hosts: two services of each kind, commands and settings that exist, room to drain."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import pytest
import typer
import yaml
from tests.deploy.test_kubernetes import validate

from tidemill.cli.main import app
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings

PLACE = Path(__file__).parent.parent.parent / "deploy" / "dags"
KINDS = ("scheduler", "parser", "worker", "triggerer")
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((PLACE / "kubernetes.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((PLACE / "compose.yaml").read_text())
DEPLOYMENTS = {one["metadata"]["name"]: one["spec"] for one in DOCUMENTS if one["kind"] == "Deployment"}


def parse(arguments: list[str]) -> None:
    """Parse arguments of the command, and run nothing."""
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]  # type: ignore[attr-defined]
    if name == "db":
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)


def test_the_compose_file_follows_the_published_schema_and_its_commands_exist() -> None:
    vendored = importlib.resources.files(check_jsonschema) / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(vendored.read_text()))
    services = COMPOSE["services"]
    for kind in KINDS:
        assert services[kind]["deploy"] == {"replicas": 2}
        assert services[kind]["command"][0] == kind
        parse(services[kind]["command"])
    parse(services["migrate"]["command"])


def test_the_manifests_follow_the_published_schemas_and_their_commands_exist(tmp_path: Path) -> None:
    (job,) = [one for one in DOCUMENTS if one["kind"] == "Job"]
    for document in DOCUMENTS:
        if document is not job:
            validate(document)
    # The schemas at hand have no jobs, but the pods of deployments.
    pod = {"metadata": {"labels": {"app": "job"}}, **job["spec"]["template"]}
    spec = {"selector": {"matchLabels": {"app": "job"}}, "template": pod}
    validate({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": job["metadata"], "spec": spec})
    assert set(DEPLOYMENTS) == {f"tidemill-{kind}" for kind in KINDS}
    config = tmp_path / "tidemill.yaml"
    config.touch()
    for spec in DEPLOYMENTS.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["replicas"] == 2
        parse([str(config) if one.startswith("/etc") else one for one in container["args"]])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (config,) = [one for one in DOCUMENTS if one["kind"] == "ConfigMap"]
    (tmp_path / "tidemill.yaml").write_text(config["data"]["tidemill.yaml"])
    return load_settings(tmp_path / "tidemill.yaml", environ={})


def test_a_worker_drains_before_it_is_killed_and_probes_ask_the_port_that_it_opens(settings: Settings) -> None:
    pod = DEPLOYMENTS["tidemill-worker"]["template"]["spec"]
    drains = settings.worker.drain_timeout_seconds + settings.worker.term_grace_seconds
    assert pod["terminationGracePeriodSeconds"] > drains
    assert int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s")) > drains
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": settings.metrics.port}]
    assert settings.metrics.host == "0.0.0.0"
    assert settings.dags.parser == "separate"
