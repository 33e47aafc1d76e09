"""The image and the Compose file: no container runs here, but everything that can be wrong without one is looked at."""

from __future__ import annotations

import fnmatch
import importlib.resources
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import pytest
import typer
import yaml
from tests.deploy.dockerfile import copied, exec_form, read_stages
from tests.packaging.clean import CleanEnvironment, lend

from tidemill.cli.main import app
from tidemill.config.loading import load_settings
from tidemill.services.triggerer.lists.file import read_entries

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "deploy" / "docker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((PLACE / "compose.yaml").read_text())
    return document


def test_the_compose_file_follows_the_published_schema(compose: dict[str, Any]) -> None:
    vendored = importlib.resources.files(check_jsonschema) / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(compose, json.loads(vendored.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"x": {"imagination": 1}}}, json.loads(vendored.read_text()))


def test_every_service_volume_and_condition_that_is_named_is_there(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {"kafka", "postgres", "pipeline", "triggers"} <= set(services)
    for name, service in services.items():
        for other, need in service.get("depends_on", {}).items():
            healthy = need["condition"] == "service_healthy"
            assert not healthy or "healthcheck" in services[other], f"{name} waits for the health of {other}"
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            there = (PLACE / source).is_file() if source.startswith("./") else source in compose["volumes"]
            assert there, f"{name}: {volume}"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to other machines"


def test_the_brokers_that_are_configured_are_those_that_are_advertised(compose: dict[str, Any]) -> None:
    advertised = compose["services"]["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    pipeline = load_settings(PLACE / "config" / "pipeline.yaml", environ={})
    (entry,) = yaml.safe_load((PLACE / "config" / "triggers.yaml").read_text())
    for brokers in (pipeline.kafka.brokers, entry["kwargs"]["brokers"]):
        assert f"INSIDE://{brokers}," in advertised
    (script,) = compose["services"]["topics"]["command"]
    for topic in (pipeline.kafka.source_topic, pipeline.sinks.kafka["results"].topic, entry["kwargs"]["topic"]):
        assert f" {topic}" in script.partition(";")[0]
    assert entry["kwargs"]["topic"] == pipeline.dlq_topic
    assert pipeline.sinks.filesystem["output"].base_path.startswith("/data/")


def test_the_commands_of_the_services_are_those_of_tidemill(compose: dict[str, Any]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name, *arguments = compose["services"]["pipeline"]["command"]
    parsed = commands[name].make_context(name, arguments).params
    assert parsed["handler"] == "access_log.pipeline:AccessLog"
    assert f"./config/pipeline.yaml:{parsed['config']}:ro" in compose["services"]["pipeline"]["volumes"]
    assert (ROOT / "examples" / "access_log" / "pipeline.py").is_file()
    group, name, *arguments = compose["services"]["triggers"]["command"]
    parsed = commands[group].commands[name].make_context(name, arguments).params
    mounts = [volume.split(":")[1] for volume in compose["services"]["triggers"]["volumes"]]
    assert sorted(mounts) == [str(parsed["config"]), str(parsed["specs"])]


def test_the_trigger_host_gets_its_list_and_its_database(compose: dict[str, Any]) -> None:
    environ = {
        name: value.replace("${TIDEMILL_POSTGRES_PASSWORD:-tidemill}", "secret")
        for name, value in compose["services"]["triggers"]["environment"].items()
    }
    settings = load_settings(PLACE / "config" / "host.yaml", environ=environ)
    assert settings.store.url == "postgresql://tidemill:secret@postgres/tidemill"
    assert read_entries(PLACE / "config" / "triggers.yaml")


def test_health_checks_ask_the_port_that_the_configuration_opens_and_publish_it_to_the_host_only(
    compose: dict[str, Any],
) -> None:
    for service, name in (("pipeline", "pipeline.yaml"), ("triggers", "host.yaml")):
        metrics = load_settings(PLACE / "config" / name, environ={}).metrics
        assert (metrics.enabled, metrics.host) == (True, "0.0.0.0")
        check = compose["services"][service]["healthcheck"]["test"]
        assert f"http://127.0.0.1:{metrics.port}/readyz" in check[-1]
        compile(check[-1], "healthcheck", "exec")
        (published,) = compose["services"][service]["ports"]
        assert published.endswith(f":{metrics.port}")


def test_an_image_is_built_by_one_service_and_never_pulled_by_the_others(compose: dict[str, Any]) -> None:
    ours = [service for service in compose["services"].values() if service["image"] == "tidemill:latest"]
    (built,) = [service for service in ours if "build" in service]
    assert all(service["pull_policy"] == "never" for service in ours if service is not built)


def test_a_service_is_stopped_only_after_it_could_drain(compose: dict[str, Any]) -> None:
    grace = compose["services"]["pipeline"]["stop_grace_period"]
    settings = load_settings(PLACE / "config" / "pipeline.yaml", environ={})
    assert int(grace.removesuffix("s")) >= settings.executor.drain_timeout_seconds + 30


# -- the image ---------------------------------------------------------------------------------------------------


def test_the_image_has_two_stages_and_an_ordinary_user() -> None:
    build, final = read_stages(PLACE / "Dockerfile")
    assert build.base == final.base
    assert any(rest.startswith(f"--from={build.name} ") for rest in final.all_of("COPY"))
    assert int(final.all_of("USER")[-1]) > 0
    assert not [rest for rest in final.all_of("RUN") if "pip" in rest]


def test_the_health_check_is_a_command_of_tidemill() -> None:
    _, final = read_stages(PLACE / "Dockerfile")
    (check,) = final.all_of("HEALTHCHECK")
    # Without a configuration it asks every process of the container.
    program, name = exec_form(check)
    assert program == "tidemill"
    assert name in typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert not any("TIDEMILL_CONFIG" in rest for rest in final.all_of("ENV"))


def test_what_the_image_copies_is_in_the_repository_and_in_its_context() -> None:
    included = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in read_stages(PLACE / "Dockerfile"):
        for rest in stage.all_of("COPY"):
            if rest.startswith("--from="):
                continue
            for source in copied(rest)[0]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(source, pattern) for pattern in included), f"{source}: .dockerignore"


def read_pin(lock: str, package: str) -> str:
    """Return the lines of a package in a lock file."""
    (found,) = re.findall(rf"^{package}==.*\n(?: +--hash.*\n)*", (ROOT / lock).read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_steps_that_install_the_image_s_packages_work_in_a_clean_environment(tmp_path: Path) -> None:
    build, _ = read_stages(PLACE / "Dockerfile")
    context, installed = tmp_path / "src", tmp_path / "opt-tidemill"
    context.mkdir()
    clean = CleanEnvironment(tmp_path / "clean", has_pip=False)
    for word, rest in build.instructions:
        if word == "COPY":
            sources, target = copied(rest)
            for source in sources:
                place = context / target if len(sources) == 1 and target != "./" else context / source
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        elif word == "RUN":
            # What was downloaded or built before is used here, unlike in an image, and little of it is imported.
            command = rest.replace("/opt/tidemill", str(installed)).replace("--no-cache-dir", "--quiet --no-compile")
            clean.run("bash", "-euc", command, cwd=context, seconds=600)
            for package in ("pyspark", "pyarrow", "botocore"):
                if not list(installed.glob(f"lib/*/site-packages/{package}")):
                    assert read_pin("requirements.lock", package) == read_pin("requirements-dev.lock", package)
                    lend(package, installed)
    shutil.rmtree(context)
    python = installed / "bin" / "python"
    clean.run(python, "-m", "pip", "check")
    clean.run(python, "-c", "import aiobotocore, asyncpg, httpx, pymongo, redis, watchfiles, tidemill.cli.demo.demo")
    assert "tidemill" in clean.run(installed / "bin" / "tidemill", "--version")
    assert not list(installed.glob("lib/*/site-packages/pytest"))
    assert list(installed.glob("lib/*/site-packages/tidemill/examples/access_log/access.log.gz"))
    assert list(installed.glob("lib/*/site-packages/pyspark/jars/*.jar"))


def test_the_entry_point_is_a_script() -> None:
    subprocess.run(["bash", "-n", PLACE / "entrypoint.sh"], check=True)
