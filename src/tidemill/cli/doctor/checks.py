"""The checks of `tidemill doctor`: each returns its finding, or raises an error that says how to fix the problem.

Checks change nothing and have a time limit each. They retry nothing, except while a broker that has just started loads
its groups.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tidemill.config.kafka_names import describe_creation
from tidemill.config.redaction import redact_text
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError, TidemillError
from tidemill.core.wording import format_count
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.files.folders import user_cache_folder, writable_cache_folder
from tidemill.runtime.process.program_lookup import find_program

CHECK_SECONDS = 5.0
#: The time limit of a check's preparation: imports on a busy host, or from a file system that hangs.
_PREPARE_SECONDS = 60.0
#: Requests to brokers end shortly before the check times out.
_ASK_SECONDS = CHECK_SECONDS - 0.5
#: How often to check whether all brokers are unreachable, in which case waiting is pointless.
_LOOK_SECONDS = 1.0


class Finding(msgspec.Struct, frozen=True):
    """The result of a check.

    Attributes:
        name: The name of the check.
        text: The result, or how to fix the problem.
        problem: The problem; None if the check passed.
    """

    name: str
    text: str
    problem: TidemillError | None = None


def run_check(
    name: str, check: Callable[[], str], seconds: float = CHECK_SECONDS, prepare: Callable[[], object] | None = None
) -> Finding:
    """Run a check with a time limit; an error becomes the finding.

    Args:
        name: The name of the check.
        check: Returns the text of the finding.
        seconds: The time limit.
        prepare: Prepares the check, for example with imports, which are slow on a busy host; the limit starts after it,
            or after `_PREPARE_SECONDS`.
    """
    box: list[Finding] = []
    prepared = threading.Event()

    def work() -> None:
        try:
            try:
                if prepare is not None:
                    prepare()
            finally:
                prepared.set()
            box.append(Finding(name, check()))
        except TidemillError as error:
            box.append(Finding(name, str(error), error))
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {redact_text(str(error))}"
            box.append(Finding(name, text, RemoteError(text)))

    # A daemon thread, because a hanging check must not keep the process alive.
    thread = threading.Thread(target=work, name=f"tidemill-doctor-{name}", daemon=True)
    thread.start()
    prepared.wait(_PREPARE_SECONDS)
    thread.join(seconds)
    if not box:
        text = f"no result within {seconds:g} s; check that the service it needs is reachable"
        return Finding(name, text, RemoteError(text))
    return box[0]


def load_kafka_client() -> None:
    """Import what asks a Kafka cluster."""
    importlib.import_module("confluent_kafka.admin")


def check_java() -> str:
    """Find a Java that Spark can use."""
    java = find_java()
    return f"version {java.version} ({java.origin}, {java.home})"


def check_cache_folder() -> str:
    """Check the folder for downloads."""
    wanted, used = user_cache_folder(), writable_cache_folder()
    if used == wanted:
        return str(used)
    return (
        f"{used}, because {wanted} cannot be written to; downloads are lost when the system clears this folder; to "
        "keep them, set XDG_CACHE_HOME to a writable folder"
    )


def check_spark(master: str) -> str:
    """Check pyspark, and the master if it has an address."""
    try:
        import pyspark
    except ImportError as error:
        raise ConfigError(f"pyspark cannot be imported: {error}; reinstall tidemill") from None
    if master.startswith("spark://"):
        for address in master.removeprefix("spark://").split(","):
            _check_address(address)
    return f"pyspark {pyspark.__version__}, master {master}"


def _check_address(address: str) -> None:
    parts = urlsplit(f"//{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 7077), timeout=_ASK_SECONDS):
            pass
    except OSError as error:
        raise RemoteError(f"no Spark master answers at {address}: {error}; start it, or change spark.master") from None


def check_worker(settings: Settings) -> str:
    """Check that this process has a usable worker name."""
    from tidemill.runtime.identity import find_worker_name

    name = find_worker_name(settings)
    variable = settings.worker_name_env
    return f"{name} (from {variable if os.environ.get(variable) else 'the name of this host'})"


def check_program(settings: ExecutorSettings) -> str:
    """Check that the default program of tasks can be run."""
    return find_program(settings)


class Cluster:
    """The answers of the brokers at one address, requested once for all checks.

    Args:
        settings: The `kafka` section.
        brokers: The addresses of another cluster; '': those in `kafka.brokers`.
        overrides: Further client properties.
        setting: The setting that names the brokers, for messages.
    """

    def __init__(self, settings: KafkaSettings, brokers: str, overrides: Mapping[str, Any], setting: str) -> None:
        """Prepare the client's configuration; nothing is requested yet."""
        from tidemill.runtime.kafka.client import make_client_config

        self.config = make_client_config(settings, brokers, overrides)
        self.brokers = str(self.config["bootstrap.servers"])
        self._setting = setting
        self._topics: dict[str, int] | None = None
        self._error: TidemillError | None = None

    def topics(self) -> dict[str, int]:
        """Return the number of partitions of each topic.

        Raises:
            TidemillError: The brokers do not answer, or reject the connection.
        """
        if self._error is not None:
            # Report the error in full only once; repetitions for each topic would hide it.
            raise RemoteError(f"unknown, because {self.brokers} did not answer")
        if self._topics is None:
            try:
                self._topics = self._ask()
            except TidemillError as error:
                self._error = error
                raise
        return self._topics

    def _ask(self) -> dict[str, int]:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import AdminClient

        from tidemill.runtime.kafka.client import (
            LibraryLog,
            advise_start,
            describe_client_error,
            describe_connection,
            scrub,
        )

        heard: list[KafkaError] = []
        config: dict[str, Any] = {**self.config, "error_cb": heard.append}
        try:
            client = AdminClient(config, logger=LibraryLog())
        except (KafkaException, TypeError, ValueError) as error:
            text = scrub(describe_client_error(error), self.config)
            raise ConfigError(f"invalid client configuration: {text}; correct client_config") from None
        deadline = time.monotonic() + _ASK_SECONDS
        while True:
            try:
                metadata = client.list_topics(timeout=min(_LOOK_SECONDS, max(0.1, deadline - time.monotonic())))
                break
            except KafkaException as error:
                client.poll(0)  # calls error_cb
                down = any(each.code() == KafkaError._ALL_BROKERS_DOWN for each in heard)
                if not down and time.monotonic() < deadline:
                    continue
                why = [each.str() for each in heard if each.code() != KafkaError._ALL_BROKERS_DOWN]
                text = describe_connection(why[-1] if why else describe_client_error(error))
                raise RemoteError(
                    f"no answer from {self.brokers}: {scrub(text, self.config)}; "
                    f"{advise_start(self.brokers, self._setting)}"
                ) from None
        return {name: len(topic.partitions) for name, topic in metadata.topics.items()}

    @property
    def answers(self) -> bool:
        """Whether the brokers have answered."""
        return self._topics is not None

    def check(self) -> str:
        """Check that the brokers answer."""
        count = len(self.topics())
        return f"{self.brokers} answers, {format_count(count, 'topic')}"

    def check_topic(self, topic: str, setting: str) -> str:
        """Check that a topic exists."""
        partitions = self.topics().get(topic)
        if partitions is None:
            how = describe_creation(topic, self.brokers)
            raise RemoteError(f"topic {topic} does not exist at {self.brokers}; {how}, or change {setting}")
        return f"topic {topic}, {format_count(partitions, 'partition')}"

    def check_dead_letters(self, topic: str) -> str:
        """Check whether the dead-letter topic exists; if not, the pipeline will create it."""
        partitions = self.topics().get(topic)
        return f"topic {topic}" + (", will be created at startup" if partitions is None else "")


def check_group(settings: Settings) -> str:
    """Check that the pipeline would be admitted to its consumer group, without joining it."""
    from confluent_kafka import KafkaException

    from tidemill.core.pipeline.group_refusal import GroupTerms, find_refusal
    from tidemill.runtime.identity import find_worker_name
    from tidemill.runtime.kafka.client import describe_client_error
    from tidemill.sources.group_facts import find_group_facts

    kafka = settings.kafka
    own_prefix = f"{kafka.consumer_group}.{find_worker_name(settings)}."
    try:
        facts = find_group_facts(kafka, own_prefix, _ASK_SECONDS / 4)
    except KafkaException as error:
        raise RemoteError(f"group {kafka.consumer_group} cannot be looked up: {describe_client_error(error)}") from None
    refusal = find_refusal(facts, GroupTerms(kafka.consumer_group, kafka.source_topic, kafka.session_timeout_ms))
    if refusal is not None:
        raise RemoteError(refusal, retryable=False)
    if facts.loading:
        return f"group {kafka.consumer_group}, members not known yet: the broker is still loading its groups"
    return f"group {kafka.consumer_group}, {format_count(facts.members, 'member')}"


def check_sink(settings: Settings, kind: str, name: str) -> str:
    """Check that a sink can connect, as in an engine; writes nothing."""
    from tidemill.sinks.build import build_sink

    sink = build_sink(settings, kind, name)

    async def connect() -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await sink.connect()
        except TimeoutError:
            raise RemoteError(f"{sink.section}: no connection within {_ASK_SECONDS:g} s") from None
        finally:
            await sink.close()

    asyncio.run(connect())
    return "connected"


def find_refusals(settings: Settings) -> list[str]:
    """Return the reasons why `tidemill run` would reject settings that are valid by themselves; starts and connects
    nothing.
    """
    from tidemill.cli.doctor.folder_checks import check_folder, list_folders
    from tidemill.runtime.identity import find_worker_name
    from tidemill.sinks.build import build_sinks
    from tidemill.spark.preflight import check_client_config, refuse_missing_program

    checks: list[Callable[[], object]] = [
        lambda: check_client_config(settings),
        lambda: find_worker_name(settings),
        lambda: refuse_missing_program(settings),
        lambda: build_sinks(settings),
        *(lambda folder=folder: check_folder(folder) for folder in list_folders(settings)),
    ]
    problems = []
    for check in checks:
        try:
            check()
        except TidemillError as error:
            problems.append(str(error) if isinstance(error, ConfigError) else redact_text(str(error)))
    return problems


def check_handler(spec: str) -> str:
    """Check that the handler can be imported, created and sent to the engines."""
    from tidemill.cli.pipelines.handlers import load_handler
    from tidemill.spark.preflight import make_handler
    from tidemill.spark.session.packaging import pack_handler

    pack_handler(make_handler(load_handler(spec)))
    return spec
