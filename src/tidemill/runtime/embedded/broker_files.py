"""The files of the embedded Kafka: its properties, and the identity of its data folder.

Invariant: written values are read back unchanged, so that a later process finds the controller under its old address.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Internal topics have few partitions, which makes startup faster and the data folder smaller.
_PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    # Without a delay, the first of two members that join together gets all partitions and must hand over half of them
    # in two rebalances, which members learn of with their heartbeats.
    "group.initial.rebalance.delay.ms": "100",
    "auto.create.topics.enable": "false",
    # A killed broker may return only after the controller has expired its earlier session (9 s by default).
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Empty records by which a cluster sees that its metadata advances. At the default of half a second, they took a
    # third of an idle broker's processor time.
    "metadata.max.idle.interval.ms": "10000",
    "log.cleaner.dedupe.buffer.size": "4194304",
    # Retention uses the records' timestamps: records of last year would be deleted five minutes after they arrived.
    "log.retention.ms": "-1",
}
_CONTROLLER = "controller.quorum.bootstrap.servers="
_CLUSTER_ID = "cluster.id="


def write_properties(path: Path, clients: str, controller: str, data: Path, extra: Mapping[str, str]) -> None:
    """Write the properties of a single broker that is its own controller.

    Args:
        path: The file.
        clients: The address for clients, as `host:port`.
        controller: The controller's address.
        data: The folder of the topics.
        extra: Properties that add to or override the defaults.
    """
    listeners = f"PLAINTEXT://{clients},CONTROLLER://{controller}"
    properties = {
        **_PROPERTIES,
        "listeners": listeners,
        "advertised.listeners": listeners,
        "controller.quorum.bootstrap.servers": controller,
        "log.dirs": str(data),
        **extra,
    }
    path.write_text("".join(f"{key}={_escape(value)}\n" for key, value in properties.items()))


def _escape(value: str) -> str:
    r"""Return a value as Java reads it from a properties file: Latin-1, with 16-bit escapes.

    Example:
        >>> print(_escape("C:" + chr(92) + "höme"))
        C:\\h\u00f6me
    """
    units = memoryview(value.encode("utf-16-le", "surrogatepass")).cast("H")
    return "".join("\\\\" if unit == 92 else chr(unit) if unit < 128 else f"\\u{unit:04x}" for unit in units)


def read_controller_port(path: Path) -> int:
    """Return the controller's port from a file of properties; 0 if it has none."""
    return int(_find(path, _CONTROLLER).rpartition(":")[2] or 0)


def read_cluster_id(path: Path) -> str:
    """Return the cluster id of a formatted data folder, from its `meta.properties`."""
    return _find(path, _CLUSTER_ID)


def _find(path: Path, prefix: str) -> str:
    lines = (line for line in path.read_text().splitlines() if line.startswith(prefix))
    return next(lines, prefix).removeprefix(prefix)
