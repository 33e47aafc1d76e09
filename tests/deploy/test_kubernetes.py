"""The manifests say what the code takes: no Kubernetes runs here, but what can be wrong without one is looked at."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pyspark
import pytest
import typer
import yaml
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from tests.deploy.dockerfile import read_stages

from tidemill.cli.main import app
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.spark.session.conf import spark_conf

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "deploy" / "kubernetes"
IMAGE = ROOT / "deploy" / "docker"
SCHEMAS = Path(__file__).parent / "schemas" / "kubernetes-1.37.json"


def documents() -> list[dict[str, Any]]:
    return [document for path in sorted(PLACE.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def one(kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def container() -> dict[str, Any]:
    (found,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The configuration as the driver's pod has it, its environment included."""
    (tmp_path / "tidemill.yaml").write_text(one("ConfigMap")["data"]["tidemill.yaml"])
    environ = {variable["name"]: variable.get("value", "from-kubernetes") for variable in container()["env"]}
    return load_settings(tmp_path / "tidemill.yaml", environ=environ)


@functools.cache
def load_schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads(SCHEMAS.read_text())
    validator_for(schemas).check_schema(schemas)
    return schemas


def validate(document: dict[str, Any]) -> None:
    """Compare a document with the published schema of its kind."""
    schema = load_schemas()
    (name,) = [name for name in schema["$defs"] if re.fullmatch(rf"io\.k8s\.api\.\w+\.v1\.{document['kind']}", name)]
    assert document["apiVersion"] in schema["$defs"][name]["properties"]["apiVersion"]["enum"]
    errors = validator_for(schema)(schema | {"$ref": f"#/$defs/{name}"}).iter_errors(document)
    if (error := best_match(errors)) is not None:
        raise error


def test_every_document_follows_the_published_schema() -> None:
    for document in [*documents(), yaml.safe_load(one("ConfigMap")["data"]["executor.yaml"])]:
        validate(document)
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        validate(one("Deployment") | {"spec": one("Deployment")["spec"] | {"replica": 1}})


def test_the_documents_belong_together() -> None:
    assert {document["kind"] for document in documents()} == {
        *("ConfigMap", "Deployment", "PersistentVolumeClaim", "Role", "RoleBinding", "ServiceAccount")
    }
    for document in documents():
        assert document["apiVersion"]
        assert document["metadata"]["name"] == "orders-pipeline"


def test_the_configuration_is_valid_and_has_what_the_pod_gives(settings: Settings) -> None:
    assert settings.kafka.client_config["sasl.password"] == "from-kubernetes"
    conf = spark_conf(settings.spark, "test", settings.spark.engines or 0)
    assert (conf["spark.driver.host"], conf["spark.kubernetes.driver.pod.name"]) == ("from-kubernetes",) * 2
    assert conf["spark.executor.instances"] == str(settings.spark.engines)
    assert conf["spark.executor.cores"] == "1"
    assert conf["spark.pyspark.python"] == "/opt/tidemill/bin/python"
    assert conf["spark.kubernetes.container.image"] == container()["image"]
    assert conf["spark.kubernetes.authenticate.serviceAccountName"] == one("ServiceAccount")["metadata"]["name"]


def test_the_pod_drains_before_it_is_killed_and_all_share_the_volume(settings: Settings) -> None:
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.executor.drain_timeout_seconds + 30
    template = yaml.safe_load(one("ConfigMap")["data"]["executor.yaml"])
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for spec in (pod, template["spec"])
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [one("PersistentVolumeClaim")["metadata"]["name"]] * 2
    mounts = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
    assert settings.sinks.filesystem["out"].base_path.startswith(tuple(mounts))


def test_the_arguments_are_those_of_the_command_and_the_handler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = container()["args"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    parsed = command.make_context(name, list(arguments)).params
    assert str(parsed["config"]) == "/etc/tidemill/tidemill.yaml"
    monkeypatch.syspath_prepend(ROOT / "examples")
    from tidemill.cli.pipelines.handlers import load_handler

    load_handler(parsed["handler"], ROOT / "examples")


def test_probes_and_prometheus_find_the_port_of_the_metrics(settings: Settings) -> None:
    (port,) = container()["ports"]
    assert (settings.metrics.enabled, settings.metrics.host) == (True, "0.0.0.0")
    assert port["containerPort"] == settings.metrics.port
    annotations = one("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(settings.metrics.port)
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container()[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_python_and_spark_are_where_the_image_has_them(settings: Settings) -> None:
    _, final = read_stages(IMAGE / "Dockerfile")
    environ = dict(pair.split("=") for pair in final.all_of("ENV")[0].split())
    (installed,) = [rest.split()[-1] for rest in final.all_of("COPY") if rest.startswith("--from=")]
    assert settings.spark.conf["spark.pyspark.python"] == f"{installed}/bin/python"
    assert environ["PATH"].startswith(f"{installed}/bin:")
    assert environ["SPARK_HOME"].startswith(f"{installed}/lib/python{final.base.split(':')[1].partition('-')[0]}/")


def test_the_entry_point_is_a_script_that_starts_a_class_that_spark_has() -> None:
    subprocess.run(["bash", "-n", IMAGE / "entrypoint.sh"], check=True)
    (wanted,) = [
        line.strip(" \\") for line in (IMAGE / "entrypoint.sh").read_text().splitlines() if "org.apache.spark" in line
    ]
    jars = (Path(pyspark.__file__).parent / "jars").glob("spark-kubernetes_*.jar")
    names = {name for jar in jars for name in zipfile.ZipFile(jar).namelist()}
    assert f"{wanted.replace('.', '/')}.class" in names
