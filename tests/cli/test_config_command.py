"""`tidemill config`: check, show, schema."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from tidemill.runtime.process.exitcode import ExitCode

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SECRETS = """
kafka:
  brokers: broker:9093
  client_config:
    security.protocol: SASL_SSL
    sasl.mechanism: PLAIN
    sasl.username: hunter2
    sasl.password: hunter2
    ssl.key.pem: hunter2
    ssl.ca.location: /ca.pem
executor:
  env: {DB_PASSWORD: hunter2, DATABASE_URL: 'postgres://app:hunter2@db/x', LANG: C}
sinks:
  kafka: {results: {topic: t, client_config: {sasl.password: hunter2}}}
spark:
  conf: {spark.hadoop.fs.s3a.secret.key: hunter2}
"""


def test_show_masks_every_secret_and_shows_the_rest(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SECRETS)

    done = tidemill("config", "show", "c.yaml", env={"TIDEMILL_KAFKA__CLIENT_CONFIG__SSL_KEY_PASSWORD": "hunter2"})

    assert done.returncode == 0
    assert "hunter2" not in done.stdout + done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["kafka"]["client_config"] == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "***",
        "sasl.password": "***",
        "ssl.key.pem": "***",
        "ssl.ca.location": "/ca.pem",
        "ssl.key.password": "***",
    }
    assert shown["executor"]["env"] == {"DB_PASSWORD": "***", "DATABASE_URL": "postgres://***@db/x", "LANG": "C"}
    assert shown["executor"]["max_executors"] == 4


def test_show_can_leave_the_defaults_out(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {source_topic: orders}\nexecutor: {max_executors: 4}\n")

    assert yaml.safe_load(tidemill("config", "show", "--changed", "c.yaml").stdout) == {
        "kafka": {"source_topic": "orders"}
    }


def test_show_has_what_only_a_trigger_host_reads_where_it_is_set(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {source_topic: orders}\n")
    store = {"TIDEMILL_STORE__URL": "postgresql://me:hunter2@db/tidemill"}

    without = yaml.safe_load(tidemill("config", "show", "c.yaml").stdout)
    shown = yaml.safe_load(tidemill("config", "show", "c.yaml", env=store).stdout)

    assert not {"store", "triggerer"} & set(without)
    assert shown["store"]["url"] == "postgresql://***@db/tidemill"
    assert "triggerer" not in shown


def test_check_says_ok_and_warns_of_a_pipeline_without_sinks(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {source_topic: t}\nsinks: {filesystem: {a: {base_path: out}}}")

    good = tidemill("config", "check", "c.yaml")
    without = tidemill("config", "check")

    assert (good.returncode, good.stdout, good.stderr) == (0, "ok: c.yaml\n", "")
    assert without.returncode == 0
    assert without.stdout == "ok: defaults and environment variables; no file was given\n"
    assert "no sink is configured" in without.stderr


def test_check_names_every_problem_but_no_secret(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SECRETS + "nope: 1\n")

    done = tidemill("config", "check", env={"TIDEMILL_CONFIG": "c.yaml", "TIDEMILL_KAFKA__PASSWORD": "hunter2"})

    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("error: the configuration is ")
    assert "nope: unknown key" in done.stderr
    assert "TIDEMILL_KAFKA__PASSWORD" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_check_names_what_the_kafka_client_does_not_take(tidemill: Run, tmp_path: Path) -> None:
    path = tmp_path / "tidemill.yaml"
    path.write_text("kafka: {source_topic: t, client_config: {no.such.key: 1, sasl.password: hunter2}}\n")
    done = tidemill("config", "check", str(path))
    assert done.returncode == 2
    assert "bad client configuration" in done.stderr
    assert "no.such.key" in done.stderr
    assert "correct kafka.client_config" in done.stderr
    assert "hunter2" not in done.stderr


def test_check_finds_what_a_run_would_refuse(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c.yaml").write_text(
        "kafka: {source_topic: t, client_config: {no.such.key: 1}}\n"
        "sinks: {filesystem: {out: {base_path: file}}}\n"
        "cache: {enabled: true, path: file}\nhistory: {path: file/below}\n"
    )

    done = tidemill("config", "check", "c.yaml", "--json", env={"WORKER_ID": "a b"})

    assert done.returncode == ExitCode.CONFIG
    said = json.loads(done.stdout)
    assert (said["ok"], said["config"], said["warnings"]) == (False, "c.yaml", [])
    for problem, words in zip(
        said["problems"],
        ("bad client configuration", "'a b'", "change sinks.filesystem.out.base_path", "history.path", "cache.path"),
        strict=True,
    ):
        assert words in problem
    text = tidemill("config", "check", "c.yaml", env={"WORKER_ID": "a b"}).stderr
    assert text.startswith("error: the configuration is invalid:\n  ")
    assert len(text.splitlines()) == 6


def test_check_gives_programs_the_problems_of_the_file_as_well(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {brokers: 'a:b', nope: 1}\n")

    wrong = json.loads(tidemill("config", "check", "c.yaml", "--json").stdout)
    right = tidemill("config", "check", "--json")

    assert [problem.split(": ")[1] for problem in wrong["problems"]] == ["kafka.brokers", "kafka.nope"]
    assert right.returncode == 0
    assert json.loads(right.stdout)["ok"] is True
    assert len(json.loads(right.stdout)["warnings"]) == 2


def test_the_schema_is_json(tidemill: Run) -> None:
    schema = json.loads(tidemill("config", "schema").stdout)

    assert schema["properties"]["kafka"] is not None


def test_check_warns_of_a_configuration_that_names_no_topic(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {brokers: 'a:1'}\n")
    done = tidemill("config", "check", "c.yaml")
    assert done.returncode == 0
    assert "warning: no kafka.source_topic is configured, so a pipeline reads the topic 'input-events'" in done.stderr
    named = tidemill("config", "check", "c.yaml", env={"TIDEMILL_KAFKA__SOURCE_TOPIC": "input-events"})
    assert "source_topic" not in named.stderr


def test_check_warns_of_a_folder_that_recordings_cannot_be_kept_in(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c.yaml").write_text("kafka: {source_topic: t}\ndebug: {db_dir: file/below}\n")
    said = json.loads(tidemill("config", "check", "c.yaml", "--json").stdout)
    assert said["ok"] is True, "a pipeline runs all the same"
    (warning,) = [text for text in said["warnings"] if "db_dir" in text]
    assert "file is a file, not a folder; remove it or change debug.db_dir" in warning
    assert "the newest 64 MiB of recordings are stored" in warning
    for env in ({"TIDEMILL_DEBUG__ENABLED": "false"}, {"TIDEMILL_DEBUG__DB_DIR": ""}):
        assert "db_dir" not in tidemill("config", "check", "c.yaml", "--json", env=env).stdout
