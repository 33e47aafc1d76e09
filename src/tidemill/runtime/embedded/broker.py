"""The embedded Kafka: a real single-node Apache Kafka as a child process.

For the demo, tests and experiments; not for production. Invariants: the broker never outlives the process that started
it, even if that process is killed. It keeps its data folder and its ports across `stop`/`kill` and `start`, so that
tests can stage an outage. It listens on the loopback interface only. It counts as started only when it answers itself,
not when another Kafka that took the port first does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker_files import read_cluster_id, read_controller_port, write_properties
from tidemill.runtime.embedded.jars import Progress, kafka_classpath
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.files.folders import OwnedFolder, create_folder
from tidemill.runtime.files.lock import HeldError, lock_file
from tidemill.runtime.process.guarded import Guarded

HOST = "127.0.0.1"
_JVM_OPTIONS = (
    *("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-Djava.awt.headless=true", "-Dlog4j2.level=WARN"),
)
#: Two processes may be given the same free port; a broker whose port is taken tries others.
_PORT_ATTEMPTS = 3
_TAIL_LINES = 25
_PORT_TAKEN = "Address already in use"


class PortInUseError(RemoteError):
    """Another program listens on the broker's port."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} of {HOST} is in use, perhaps by another Kafka; stop that program or choose another port"
        )


class EmbeddedBroker:
    """One Kafka broker (and controller) of this process.

    Topics keep their records forever, whatever their timestamps, unless `properties` or a topic's own properties limit
    this (`log.retention.ms`, `retention.ms`).

    Args:
        data_dir: The folder of topics and logs; None creates a temporary folder that `close` removes.
        port: The port for clients; 0 chooses a free one at the first start.
        properties: Broker properties that add to or override the defaults.
        progress: Called with a line of text while jars are downloaded and the broker starts.
        start_timeout_seconds: How long the first metadata answer may take after the process starts, and how long the
            formatting of a new data folder may take.

    Example:
        with EmbeddedBroker() as broker:
            broker.create_topic("orders", partitions=4)
            print(broker.bootstrap)
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int = 0,
        *,
        properties: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        """Prepare the broker; `start` starts it."""
        self._temporary: OwnedFolder | None = None
        if data_dir is None:
            self._temporary = OwnedFolder("tidemill-kafka-")
            data_dir = self._temporary.path
        self.data_dir = data_dir.resolve()
        self._fixed_port = port
        self._port = port
        self._controller_port = 0
        self._properties = dict(properties or {})
        self._progress: Progress = progress or (lambda text: None)
        self._start_timeout_seconds = start_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._guarded: Guarded | None = None
        self._lock: int | None = None
        self._cluster_id = ""
        self._admin_client: AdminClient | None = None

    @property
    def bootstrap(self) -> str:
        """The value for clients' `bootstrap.servers`."""
        if not self._port:
            raise RuntimeError("the broker has no address before its first start()")
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The Java process, None if there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether the Java process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The broker's output, across all its starts."""
        return self.data_dir / "broker.log"

    def start(self) -> EmbeddedBroker:
        """Start (or restart) and wait until the broker answers clients; does nothing while it is running.

        Raises:
            PortInUseError: Another program has the requested port.
            RemoteError: The broker did not start (with the end of its log), or its jars cannot be downloaded.
            ConfigError: There is no Java, the data folder cannot be created, or another broker uses it.
        """
        if self.running:
            return self
        self._forget_process()
        if self._fixed_port and _answers(self._fixed_port):
            raise PortInUseError(self._fixed_port)
        # Before the download, which takes a while.
        create_folder(self.data_dir)
        self._lock_folder()
        try:
            self._start_process()
        except BaseException:
            self._end(signal.SIGKILL, 10.0)
            raise
        self._progress(f"Apache Kafka answers on {self.bootstrap}")
        return self

    def _start_process(self) -> None:
        java = str(find_java().executable)
        command = [java, *_JVM_OPTIONS, "-cp", kafka_classpath(self._progress)]
        first = not self._meta_path.exists()
        self._progress("starting Apache Kafka")
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._write_properties()
            if first:
                self._format(command)
            self._cluster_id = read_cluster_id(self._meta_path)
            self._spawn([*command, "kafka.Kafka", str(self._properties_path)])
            try:
                self._wait_until_ready()
            except RemoteError as error:
                self._end_process(signal.SIGKILL, 10.0)
                taken = isinstance(error, PortInUseError) or _PORT_TAKEN in self.read_log_tail()
                if taken and self._fixed_port and _answers(self._fixed_port):
                    raise PortInUseError(self._fixed_port) from error
                if not (first and taken and not self._fixed_port and attempt < _PORT_ATTEMPTS):
                    raise
                self._port = self._controller_port = 0
                shutil.rmtree(self.data_dir / "data", ignore_errors=True)
            else:
                return

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Shut the broker down cleanly (SIGTERM; SIGKILL after the timeout); `start` restarts it."""
        self._end(signal.SIGTERM, timeout_seconds)

    def kill(self) -> None:
        """End the broker like a crash (SIGKILL); `start` restarts it."""
        self._end(signal.SIGKILL, 10.0)

    def close(self) -> None:
        """Stop for good; a temporary data folder is removed."""
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> EmbeddedBroker:
        """Start; a failed start leaves nothing behind."""
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float = 20.0,
    ) -> str:
        """Create a topic and wait until clients can use it.

        Args:
            name: The topic; it must not exist yet.
            partitions: The number of partitions.
            config: Topic properties, for example `{"max.message.bytes": "1000"}`.
            timeout_seconds: The limit for creating the topic and for its metadata together.

        Returns:
            The name.

        Raises:
            RemoteError: The broker refused, or did not lead all partitions in time.
        """
        deadline = time.monotonic() + timeout_seconds
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
        while True:
            try:
                self._admin().create_topics([topic], operation_timeout=timeout_seconds)[name].result(timeout_seconds)
                break
            except KafkaException as error:
                # The controller fences the only broker if the machine is too busy for its heartbeats.
                is_fenced = error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR
                if not is_fenced or time.monotonic() > deadline:
                    raise RemoteError(f"topic {name!r} could not be created: {error.args[0].str()}") from error
                time.sleep(0.1)
        # CreateTopics is answered before every client can see the topic.
        while not self._is_led(name, partitions):
            if time.monotonic() > deadline:
                raise RemoteError(f"topic {name!r} was created but has no leader after {timeout_seconds:g} s")
            time.sleep(0.02)
        return name

    def read_log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the broker's output."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    @property
    def _properties_path(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def _meta_path(self) -> Path:
        return self.data_dir / "data" / "meta.properties"

    def _admin(self) -> AdminClient:
        if self._admin_client is None:
            # Hide the client's errors while the broker is down on purpose.
            settings: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
            self._admin_client = AdminClient({"bootstrap.servers": self.bootstrap, **settings})
        return self._admin_client

    def _is_led(self, name: str, partitions: int) -> bool:
        try:
            topic = self._admin().list_topics(name, timeout=2.0).topics[name]
        except KafkaException:
            return False
        leaders = [partition.leader for partition in topic.partitions.values()]
        return topic.error is None and len(leaders) == partitions and min(leaders) >= 0

    def _write_properties(self) -> None:
        if self._properties_path.exists() and not self._controller_port:
            # A data folder of an earlier process: the controller is known under its old address.
            self._controller_port = read_controller_port(self._properties_path)
        self._port = self._port or free_port()
        self._controller_port = self._controller_port or free_port()
        clients, controller = f"{HOST}:{self._port}", f"{HOST}:{self._controller_port}"
        write_properties(self._properties_path, clients, controller, self.data_dir / "data", self._properties)

    def _format(self, command: list[str]) -> None:
        # The fixed first byte avoids an id that begins with "-", which would be parsed as an option.
        cluster_id = base64.urlsafe_b64encode(b"t" + secrets.token_bytes(15)).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "--standalone", "-t", cluster_id, "-c"]
        try:
            done = subprocess.run(
                [*command, *tool, str(self._properties_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_make_environment(),
                text=True,
                errors="replace",
                timeout=self._start_timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(
                f"the broker's data folder {self.data_dir} was not formatted within {self._start_timeout_seconds:g} s; "
                "try again when the machine is less busy"
            ) from None
        if done.returncode != 0:
            raise RemoteError(f"the broker's data folder {self.data_dir} could not be formatted:\n{done.stdout}")

    def _spawn(self, command: list[str]) -> None:
        with self.log_path.open("ab") as log:
            self._guarded = Guarded(command, output=log, cwd=self.data_dir, env=_make_environment())
        self._process = self._guarded.process

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_seconds
        # A new client, because one that saw the port closed would wait before its next attempt.
        while not _answers(self._port):
            self._check_progress(deadline)
            time.sleep(0.05)
        self._admin_client = None
        while True:
            try:
                answer = self._admin().list_topics(timeout=2.0)
                if answer.brokers:
                    if answer.cluster_id != self._cluster_id:
                        raise PortInUseError(self._port)
                    return
            except KafkaException:
                pass  # still starting; the deadline and the process decide
            self._check_progress(deadline)
            time.sleep(0.05)

    def _check_progress(self, deadline: float) -> None:
        if not self.running:
            code = self._process.returncode if self._process is not None else None
            tail = self.read_log_tail()
            raise RemoteError(f"Apache Kafka exited while starting (exit code {code}); its log says:\n{tail}")
        if time.monotonic() > deadline:
            raise RemoteError(
                f"Apache Kafka did not answer on port {self._port} within {self._start_timeout_seconds:g} s; "
                f"its log says:\n{self.read_log_tail()}"
            )

    def _lock_folder(self) -> None:
        # Kafka has a lock, too, but notices too late, when the other broker's properties are already overwritten.
        if self._lock is not None:
            return
        try:
            self._lock = lock_file(self.data_dir / "broker.lock")
        except HeldError as held:
            raise ConfigError(
                f"the data folder {self.data_dir} is used by another broker (process {held.holder}); stop that broker "
                "or choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the data folder {self.data_dir} cannot be locked: {error.strerror}; choose another folder"
            ) from None

    def _end(self, number: signal.Signals, timeout_seconds: float) -> None:
        self._end_process(number, timeout_seconds)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_process(self, number: signal.Signals, timeout_seconds: float) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)
        self._forget_process()

    def _forget_process(self) -> None:
        if self._guarded is not None:
            self._guarded.dismiss_guard()
        self._guarded = self._process = None


#: Below the ports that Linux and other systems use for outgoing connections.
_QUIET_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """Return a TCP port on the loopback interface that was free a moment ago.

    Prefers a port that the system does not use for outgoing connections, because these could take it at any moment.
    """
    for port in random.sample(_QUIET_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _make_environment() -> dict[str, str]:
    # In a locale without UTF-8, Java could not open a folder with non-ASCII letters in its name.
    return {**os.environ, "LC_ALL": "C.UTF-8"}


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False
