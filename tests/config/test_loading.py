"""Loading: where values come from, and what is said about those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tidemill.config.loading import load_settings, require_letters_named, revalidate
from tidemill.config.settings import Settings, find_revoke_problem
from tidemill.core.errors import ConfigError

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a YAML text with an environment."""

    def run(text: str, environ: Mapping[str, str] | None = None, **more: object) -> Settings:
        path = tmp_path / "tidemill.yaml"
        path.write_text(text)
        return load_settings(path, environ or {}, **more)  # type: ignore[arg-type]

    return run


def refused(load: Load, text: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, environ)
    return str(caught.value)


# -- what is valid ------------------------------------------------------------------------------------------------


def test_nothing_at_all_gives_the_defaults() -> None:
    settings = load_settings(None, {})

    assert settings == Settings()
    assert settings.kafka.brokers == "localhost:9092"
    assert settings.dlq_topic == "input-events_dlq"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "kafka:\nsinks:\n  kafka:\nexecutor:\n  env:\n"])
def test_empty_files_and_empty_sections_mean_the_defaults(load: Load, text: str) -> None:
    assert load(text) == Settings()


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("kafka: {source_topic: orders}")

    assert load_settings(None, {"TIDEMILL_CONFIG": str(path)}).kafka.source_topic == "orders"


def test_merge_keys_and_anchors_work(load: Load) -> None:
    settings = load(
        "sinks:\n  kafka:\n    a: &a {topic: t, ui_url: u}\n    b:\n      <<: *a\n      topic: other\n",
    )

    assert settings.sinks.kafka["b"].model_dump()["ui_url"] == "u"
    assert settings.sinks.kafka["b"].topic == "other"


def test_levels_may_be_in_lower_case(load: Load) -> None:
    assert load("logging: {level: debug}").logging.level == "DEBUG"


# -- the environment ----------------------------------------------------------------------------------------------


def test_the_environment_wins_over_the_file_key_by_key(load: Load) -> None:
    settings = load(
        "kafka: {brokers: 'a:1', source_topic: b}\nexecutor: {max_executors: 2}",
        {"TIDEMILL_KAFKA__SOURCE_TOPIC": "c", "TIDEMILL_EXECUTOR__MAX_EXECUTORS": "8"},
    )

    assert (settings.kafka.brokers, settings.kafka.source_topic) == ("a:1", "c")
    assert settings.executor.max_executors == 8


def test_overrides_from_code_win_over_both(load: Load) -> None:
    settings = load(
        "kafka: {source_topic: a}",
        {"TIDEMILL_KAFKA__SOURCE_TOPIC": "b"},
        overrides={"kafka": {"source_topic": "c"}},
    )

    assert settings.kafka.source_topic == "c"


def test_a_text_setting_stays_a_text_whatever_it_looks_like() -> None:
    environ = {
        "TIDEMILL_KAFKA__SOURCE_TOPIC": "123",
        "TIDEMILL_KAFKA__CONSUMER_GROUP": "true",
        "TIDEMILL_KAFKA__CLIENT_CONFIG__SASL_PASSWORD": "0042",
        "TIDEMILL_EXECUTOR__ENV__PORT": "80",
        "TIDEMILL_EXECUTOR__BINARY_PATH": "",
    }

    settings = load_settings(None, environ)

    assert settings.kafka.source_topic == "123"
    assert settings.kafka.consumer_group == "true"
    assert settings.kafka.client_config == {"sasl.password": "0042"}
    assert settings.executor.env == {"PORT": "80"}


def test_other_settings_are_read_as_yaml_or_json() -> None:
    environ = {
        "TIDEMILL_EXECUTOR__TASK_TIMEOUT_SECONDS": "1.5",
        "TIDEMILL_SPARK__ENGINES": "null",
        "TIDEMILL_EXECUTOR__ENV_INHERIT_DENY": '["A_*", "B"]',
        "TIDEMILL_SINKS__FILESYSTEM__OUT__FSYNC": "true",
        "TIDEMILL_SINKS__FILESYSTEM__OUT__BASE_PATH": "out",
        "TIDEMILL_SPARK": '{"conf": {"spark.x": "1"}}',
    }

    settings = load_settings(None, environ)

    assert settings.executor.task_timeout_seconds == 1.5
    assert settings.spark.engines is None
    assert settings.executor.env_inherit_deny == ["A_*", "B"]
    assert settings.sinks.filesystem["out"].fsync is True
    assert settings.spark.conf == {"spark.x": "1"}


def test_names_in_the_file_are_found_without_regard_to_case(load: Load) -> None:
    settings = load(
        "sinks: {kafka: {Results: {topic: a}}}\nkafka: {client_config: {Weird.Key: 1}}\n"
        "spark: {conf: {spark.dynamicAllocation.enabled: 'false'}}",
        {
            "TIDEMILL_SINKS__KAFKA__RESULTS__TOPIC": "b",
            "TIDEMILL_KAFKA__CLIENT_CONFIG__WEIRD_KEY": "2",
            "TIDEMILL_SPARK__CONF__SPARK_DYNAMICALLOCATION_ENABLED": "true",
        },
    )

    assert {name: sink.topic for name, sink in settings.sinks.kafka.items()} == {"Results": "b"}
    assert settings.kafka.client_config == {"Weird.Key": "2"}
    assert settings.spark.conf == {"spark.dynamicAllocation.enabled": "true"}


def test_a_section_given_as_json_is_merged_and_its_keys_can_be_overridden(load: Load) -> None:
    settings = load(
        "kafka: {client_config: {a.b: '1', c.d: '2'}}",
        {
            "TIDEMILL_KAFKA__CLIENT_CONFIG": '{"a.b": "3", "e.f": "4"}',
            "TIDEMILL_KAFKA__CLIENT_CONFIG__E_F": "5",
        },
    )

    assert settings.kafka.client_config == {"a.b": "3", "c.d": "2", "e.f": "5"}


def test_variables_that_are_not_settings_are_left_alone() -> None:
    environ = {
        "TIDEMILL_OFFLINE": "1",
        "TIDEMILL_MAVEN_URL": "x",
        "TIDEMILL_ENGINE_ID": "x",
        "TIDEMILL_JARS": "/x",
        "OTHER__X": "1",
    }

    assert load_settings(None, environ) == Settings()


def test_a_variable_with_one_underscore_too_few_is_named(load: Load) -> None:
    message = refused(load, "", {"TIDEMILL_KAFKA_SOURCE_TOPIC": "x"})

    assert "TIDEMILL_KAFKA_SOURCE_TOPIC: has no effect; did you mean TIDEMILL_KAFKA__SOURCE_TOPIC?" in message


def test_top_level_settings_have_plain_names() -> None:
    assert load_settings(None, {"TIDEMILL_CLUSTER_NAME": "blue"}).cluster_name == "blue"


def test_an_unknown_variable_is_named_with_the_nearest_setting(load: Load) -> None:
    message = refused(load, "", {"TIDEMILL_KAFKA__SOURCE_TOPICS": "x"})

    assert "TIDEMILL_KAFKA__SOURCE_TOPICS: unknown setting kafka.source_topics" in message
    assert "did you mean TIDEMILL_KAFKA__SOURCE_TOPIC" in message


@pytest.mark.parametrize(
    "name",
    ["TIDEMILL_KAFKA__", "TIDEMILL_X__Y", "TIDEMILL___", "TIDEMILL_KAFKA__BROKERS__X", "TIDEMILL_SINKS__KAFKA__"],
)
def test_a_variable_with_a_wrong_path_is_named(load: Load, name: str) -> None:
    assert name in refused(load, "", {name: "x"})


def test_two_variables_for_one_setting_are_refused(load: Load) -> None:
    message = refused(load, "", {"TIDEMILL_KAFKA__BROKERS": "a", "TIDEMILL_kafka__brokers": "b"})

    assert "TIDEMILL_KAFKA__BROKERS" in message
    assert "TIDEMILL_kafka__brokers" in message


def test_a_wrong_value_names_its_variable_and_not_the_file(load: Load) -> None:
    message = refused(load, "executor:\n  max_executors: 4\n", {"TIDEMILL_EXECUTOR__MAX_EXECUTORS": "many"})

    assert "TIDEMILL_EXECUTOR__MAX_EXECUTORS: executor.max_executors: expected a whole number" in message
    assert "got the string 'many'" in message


def test_a_variable_that_is_not_yaml_is_named(load: Load) -> None:
    assert "TIDEMILL_EXECUTOR__ENV: not valid YAML" in refused(load, "", {"TIDEMILL_EXECUTOR__ENV": "{"})


# -- what is wrong with a file ------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_place_and_nearest_key(load: Load) -> None:
    message = refused(load, "kafka:\n  brokers: a:1\n  source_topics: b\n")

    assert "tidemill.yaml:3: kafka.source_topics: unknown key; did you mean source_topic?" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kafak: {}", "tidemill.yaml:1: kafak: unknown key; did you mean kafka?"),
        ("source_topic: x", "did you mean kafka.source_topic?"),
        ("sinks: {file: {a: {base_path: x}}}", "sinks.file: unknown key; did you mean filesystem?"),
        ("sinks: {kafka: {out: {topics: x}}}", "sinks.kafka.out.topics: unknown key; did you mean topic?"),
        ("executor: {zzz: 1}", "executor.zzz: unknown key; known keys: binary_path, max_executors"),
        ("executor: {retry_backoff: {initial: 1}}", "did you mean initial_seconds?"),
        ("kafka: {sasl.password: x}", "unknown key; properties of librdkafka belong in client_config"),
    ],
)
def test_the_nearest_known_key_is_found(load: Load, text: str, expected: str) -> None:
    assert expected in refused(load, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kafka: {max_poll_records: many}", "expected a whole number, got the string 'many'"),
        ("kafka: {max_poll_records: true}", "expected a whole number, got the truth value true"),
        ("kafka: {max_poll_records: 1.5}", "expected a whole number, got the number 1.5"),
        ("kafka: {max_poll_records: 0}", "expected a number above 0, got the number 0"),
        ("kafka: {source_topic: 5}", "expected a string, got the number 5; write it in quotes"),
        ("kafka: {source_topic: 2024-01-01}", "expected a string, got the date 2024-01-01; write it in quotes"),
        ("kafka: {brokers: ''}", "expected a non-empty string"),
        ("kafka: {on_parse_error: drop}", "expected 'dlq' or 'pass', got the string 'drop'"),
        ("kafka: [1]", "kafka: expected a section (a mapping of keys to values), got a list"),
        ("kafka: {client_config: x}", "expected a mapping of keys to values, got a string"),
        ("executor: {env_inherit_deny: X}", 'expected a list, got the string \'X\'; for example ["a", "b"]'),
        ("kafka:\n  brokers:a", "got a string; each key needs a colon and a space after it"),
        ("sinks: {kafka: {topic: a}}", "every sink needs a name, as in sinks.kafka.my-name.topic"),
        ("executor: {env: {A: 1}}", "executor.env.A: expected a string, got the number 1; write it in quotes"),
        ("executor: {task_timeout_seconds: .inf}", "expected a finite number"),
        ("executor: {task_timeout_seconds: }", "expected a number, got nothing"),
        ("sinks: {filesystem: {a: {base_path: x, fsync: 1}}}", "expected true or false, got the number 1"),
        ("sinks: {kafka: {out: {}}}", "tidemill.yaml:1: sinks.kafka.out.topic: is required"),
        ("sinks: {kafka: {out: }}", "sinks.kafka.out.topic: is required"),
        ("sinks: {kafka: {out: {topic: 'a b'}}}", "is not a valid topic name"),
        ("kafka: {source_topic: ..}", "is not a valid topic name"),
        ("kafka: {consumer_group: a/b}", "is not a usable group name"),
        ("triggerer: {capacity: 99999999999999999999}", "triggerer.capacity: expected a number of at most 1000000"),
        ("worker: {concurrency: 99999999999999999999}", "worker.concurrency: expected a number of at most 100000"),
        ("services: {lease_seconds: 0.001}", "services.lease_seconds: expected a number of at least 1"),
        ("services: {lease_seconds: 1.0e+12}", "services.lease_seconds: expected a number of at most 86400"),
        ('worker: {queues: ["a\\0"]}', "worker.queues.0: the name of a queue may not contain a NUL character"),
    ],
)
def test_a_wrong_value_says_what_is_expected_and_what_is_there(load: Load, text: str, expected: str) -> None:
    assert expected in refused(load, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kafka: {session_timeout_ms: 1000}", "heartbeat_interval_ms (1000) must be below session_timeout_ms (1000)"),
        ("kafka: {max_poll_interval_ms: 10}", "session_timeout_ms (45000) must not exceed max_poll_interval_ms (10)"),
        (
            "executor: {backpressure_low_multiplier: 32}",
            "backpressure_low_multiplier (32) must be below backpressure_high_multiplier (32)",
        ),
        ("executor: {max_queued_bytes: 5}", "window_max_bytes (8388608) must not exceed max_queued_bytes (5)"),
        (
            "executor: {retry_backoff: {initial_seconds: 60}}",
            "initial_seconds (60.0) must not exceed max_seconds (30.0)",
        ),
        (
            "kafka: {revoke_timeout_seconds: 291}",
            "kafka.revoke_timeout_seconds (291) and 10 s must not exceed kafka.max_poll_interval_ms (300000)",
        ),
        (
            "executor: {drain_timeout_seconds: 600}",
            "kafka.revoke_timeout_seconds (600, the value of executor.drain_timeout_seconds) and 10 s must not exceed",
        ),
        (
            "dlq: {path: letters, topic: t}",
            "dlq: path sends dead letters to files instead of a topic; remove it, or remove topic",
        ),
        (
            "dlq: {path: letters, brokers: 'b:1', on_send_failure: drop}",
            "instead of a topic; remove it, or remove brokers and on_send_failure",
        ),
        ("dlq: {topic: input-events}", "dlq.topic must not be the source topic (input-events)"),
        ("sinks: {kafka: {o: {topic: t, client_config: {bootstrap.servers: x}}}}", "set brokers of this sink"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(load: Load, text: str, expected: str) -> None:
    assert expected in refused(load, text)


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("enable.auto.commit", "it is always false"),
        ("auto.offset.reset", "it is always earliest"),
        ("group.id", "set kafka.consumer_group"),
        ("group.instance.id", "built from kafka.consumer_group"),
        ("partition.assignment.strategy", "it is always cooperative-sticky"),
        ("bootstrap.servers", "set kafka.brokers"),
        ("session.timeout.ms", "set kafka.session_timeout_ms"),
    ],
)
def test_client_properties_of_tidemill_are_refused_with_what_to_use(load: Load, key: str, instead: str) -> None:
    message = refused(load, f"kafka:\n  client_config:\n    linger.ms: 5\n    {key}: x\n")

    assert f"tidemill.yaml:4: kafka.client_config: {key} cannot be set here: " in message
    assert instead in message


def test_all_problems_are_reported_at_once(load: Load) -> None:
    message = refused(
        load,
        "kafka:\n  brokers: a:1\n  brokers: b:1\n  max_poll_records: x\nnope: 1\nsinks: {kafka: {o: {}}}\n",
        {"TIDEMILL_A__B": "1"},
    )

    for part in (
        ":3: kafka.brokers: duplicate key",
        "max_poll_records",
        "nope",
        "sinks.kafka.o.topic",
        "TIDEMILL_A__B",
    ):
        assert part in message
    assert len(message.splitlines()) == 6


def test_a_key_that_is_there_twice_names_both_lines(load: Load) -> None:
    message = refused(load, "executor:\n  max_retries: 1\n  window_size: 5\n  max_retries: 2\n")

    assert "tidemill.yaml:4: executor.max_retries: duplicate key; first defined on line 2" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kafka:\n  brokers: [a\n", "tidemill.yaml:3:1: not valid YAML"),
        ("kafka:\n\tbrokers: a\n", "tidemill.yaml:2:1: not valid YAML"),
        ("kafka:\n\tbrokers: a\n", "use spaces"),
        ("kafka:\n  brokers a\n  source_topic: b\n", "look for a missing ':'"),
        ("kafka: {brokers: 'a}\n", "a quote or a bracket is not closed"),
        ("a: 1\n---\nb: 2\n", "tidemill.yaml:2:1: not valid YAML: expected a single document"),
        ("- kafka\n", "expected sections (kafka, executor, ...) at the top"),
        (
            "executor: {env: {on: 'x'}}",
            "executor.env.on: YAML reads this key as a value of type bool; put it in quotes",
        ),
        ("kafka: &k {client_config: *k}", "contains itself"),
        ("kafka: {source_topic: !x y}", "has an unknown tag"),
        ("kafka: {source_topic: 2024-99-99}", "is not a valid date, time or number; quote the value"),
    ],
)
def test_what_is_not_valid_yaml_has_a_place(load: Load, text: str, expected: str) -> None:
    assert expected in refused(load, text)


@pytest.mark.parametrize("typed", ["shout.yml", "shuot.yaml", "shout"])
def test_a_misspelt_file_is_answered_with_the_nearest_one_in_its_folder(tmp_path: Path, typed: str) -> None:
    (tmp_path / "shout.yaml").touch()
    (tmp_path / "other.yaml").touch()
    with pytest.raises(ConfigError, match=rf"{typed} does not exist; did you mean .*/shout\.yaml\?"):
        load_settings(tmp_path / typed)


def test_a_missing_file_is_named_with_what_named_it(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"

    with pytest.raises(ConfigError, match=r"no\.yaml does not exist.*tidemill init"):
        load_settings(missing, {})
    with pytest.raises(ConfigError, match=r"no\.yaml \(named by TIDEMILL_CONFIG\) does not exist"):
        load_settings(None, {"TIDEMILL_CONFIG": str(missing)})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("merge", [False, True], ids=["values", "merge keys"])
def test_aliases_that_expand_to_millions_of_values_are_refused(load: Load, merge: bool) -> None:
    levels = ["a0: &a0 {x: 1}"]
    for level in range(1, 12):
        many = ", ".join([f"*a{level - 1}"] * 9)
        levels.append(f"a{level}: &a{level} " + (f"{{<<: [{many}]}}" if merge else f"[{many}]"))
    with pytest.raises(ConfigError, match=r"aliases \(\*name\) expand to more than 10,000 values"):
        load("\n".join(levels))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("dlq: {}\nkafka: " + "[" * 200_000 + "]" * 200_000, 2),
        ("- " * 200_000, 1),
        ("\n".join(" " * level + "a:" for level in range(200)), 101),
    ],
    ids=["brackets", "dashes", "indentation"],
)
def test_what_is_nested_too_deeply_is_refused_with_its_line(load: Load, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf":{line}: nested more than 100 levels deep"):
        load(text)


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is larger than 16 MiB; is it the right file"):
        load_settings("/dev/zero", {})


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xfa")

    with pytest.raises(ConfigError, match="is a folder; give the path of its YAML file"):
        load_settings(tmp_path, {})
    with pytest.raises(ConfigError, match=r"is not UTF-8 text: .*; save the file as UTF-8"):
        load_settings(tmp_path / "b.yaml", {})


# -- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "kafka: {client_config: {sasl.password: hunter2}, max_poll_records: x}",
        "kafka: {client_config: hunter2}",
        "kafka: hunter2",
        "kafka: {client_config: {sasl.password: *hunter2}}",
        "kafka: {client_config: {sasl.password: !hunter2 x}}",
        "kafka: {client_config: {sasl.password: 'hunter2}}",
        "kafka: {client_config: {sasl.password: hunter2: x}}",
        "executor: {env: {DB_PASSWORD: 42424242}}",
        "kafka: {source_topic: 'http://me:hunter2@host/'}",
        "history: {path: 'password=hunter2', paths: 1}",
        "executor: {max_retries: 'token=hunter2'}",
    ],
)
def test_no_error_shows_a_secret(load: Load, text: str) -> None:
    message = refused(load, text)

    assert "hunter2" not in message
    assert "42424242" not in message


def test_no_error_about_a_variable_shows_a_secret(load: Load) -> None:
    for raw in ('{"sasl.password": "hunter2"', "hunter2", '["hunter2"]'):
        assert "hunter2" not in refused(load, "", {"TIDEMILL_KAFKA__CLIENT_CONFIG": raw})
    assert "hunter2" not in refused(load, "", {"TIDEMILL_KAFKA__PASSWORD": "hunter2"})


def test_not_even_the_models_own_errors_show_values() -> None:
    settings = Settings()

    with pytest.raises(ValueError, match="client_config") as caught:
        settings.kafka.client_config = "hunter2"  # type: ignore[assignment]

    assert "hunter2" not in str(caught.value)


# -- changed in code ----------------------------------------------------------------------------------------------


def test_settings_changed_in_code_are_checked_as_a_whole() -> None:
    settings = Settings()
    settings.kafka.client_config["group.id"] = "x"

    with pytest.raises(ConfigError, match=r"on_startup: kafka\.client_config: group\.id cannot be set here"):
        revalidate(settings)


def test_settings_that_are_still_valid_stay_the_same() -> None:
    settings = load_settings(None, {"TIDEMILL_SINKS__KAFKA__A__TOPIC": "t"})
    settings.executor.max_executors = 9

    assert revalidate(settings) == settings


def test_one_file_and_one_environment_are_for_a_trigger_host_too(load: Load) -> None:
    settings = load(
        "triggerer: {shared_stream_ack_timeout: 5}",
        {
            "TIDEMILL_STORE__URL": "sqlite:////srv/tidemill.db",
            "TIDEMILL_TRIGGERER__SHARED_STREAM_MAX_OUTSTANDING": "10",
        },
    )

    assert settings.store.url == "sqlite:////srv/tidemill.db"
    assert settings.triggerer.model_dump() == {
        "shared_stream_subscriber_queue_size": 1024,
        "shared_stream_ack_timeout": 5.0,
        "shared_stream_cohort_grace_period": 0.0,
        "shared_stream_max_outstanding": 10,
        "max_undelivered_events": 1000,
        "seat_seconds": 60.0,
        "list_name": "",
        "block_threshold_seconds": 0.2,
        "block_limit_seconds": 120.0,
        "queues": ["default"],
        "capacity": 10_000,
    }


def test_revoked_partitions_wait_as_long_as_a_drain_unless_they_have_a_time_of_their_own(load: Load) -> None:
    assert load("executor: {drain_timeout_seconds: 7}").revoke_timeout_seconds == 7
    long_drain = load("kafka: {revoke_timeout_seconds: 3}\nexecutor: {drain_timeout_seconds: 900}")
    assert long_drain.revoke_timeout_seconds == 3


def test_only_a_pipeline_minds_a_poll_interval_below_the_times_that_nobody_set(load: Load) -> None:
    settings = load("kafka: {max_poll_interval_ms: 30000, session_timeout_ms: 6000}")
    problem = find_revoke_problem(settings)
    assert problem is not None
    assert "(30, the value of executor.drain_timeout_seconds) and 10 s" in problem


@pytest.mark.parametrize(
    ("path", "environ"),
    [
        ("mine.yaml", {}),
        (None, {"TIDEMILL_CONFIG": "mine.yaml"}),
        (None, {"TIDEMILL_KAFKA__SOURCE_TOPIC": "orders"}),
        (None, {"TIDEMILL_DLQ__TOPIC": "letters"}),
        (None, {"TIDEMILL_DLQ__PATH": "letters"}),
    ],
)
def test_dead_letters_are_named_by_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, environ: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("executor: {}\n")
    require_letters_named(load_settings(path, environ), path, environ)


def test_without_a_configuration_the_files_of_the_folder_that_can_be_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"TIDEMILL_KAFKA__BROKERS": "b:9092"}
    with pytest.raises(ConfigError, match=r"give its file as an argument, or set TIDEMILL_CONFIG"):
        require_letters_named(load_settings(None, environ), None, environ)
    files = {
        "b.yml": "kafka: {}",
        "a.yaml": "dlq:",
        "compose.yaml": "services: {}",
        "list.yaml": "[1]",
        "bad.yaml": "a: [",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"\(this folder has a\.yaml, b\.yml\)"):
        require_letters_named(load_settings(None, environ), None, environ)
