"""The files that the embedded Kafka reads and writes: its properties, and the identity of its data folder.

Invariant: what is written is read back the same, so that a later process finds the controller under its old address.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: One partition of everything internal that allows it: a start is faster and a data folder smaller.
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
    # Without any, the first of two members that join together has everything for itself, and has to hand over half of
    # it in two rebalances, which members learn of with their heartbeats.
    "group.initial.rebalance.delay.ms": "100",
    "auto.create.topics.enable": "false",
    # A broker that was killed may come back only when the controller has expired its earlier session (9 s).
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Records that say nothing, by which a cluster sees that its metadata moves on: every half second, they were a third
    # of the processor time of a broker with nothing to do.
    "metadata.max.idle.interval.ms": "10000",
    "log.cleaner.dedupe.buffer.size": "4194304",
    # Retention goes by the records' timestamps: records of last year would be gone five minutes after they came.
    "log.retention.ms": "-1",
}
_CONTROLLER = "controller.quorum.bootstrap.servers="
_CLUSTER_ID = "cluster.id="


def write_properties(path: Path, clients: str, controller: str, data: Path, extra: Mapping[str, str]) -> None:
    """Write the properties of a single broker that is its own controller.

    Args:
        path: The file.
        clients: Where clients connect, as `host:port`.
        controller: Where the controller listens.
        data: The folder of the topics.
        extra: Properties on top of (or instead of) the defaults.
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
    """Return a value as Java reads it from such a file: Latin-1, with escapes of 16 bits.

    Example:
        >>> print(_escape("C:" + chr(92) + "höme"))
        C:\\\\h\\u00f6me
    """
    units = memoryview(value.encode("utf-16-le", "surrogatepass")).cast("H")
    return "".join("\\\\" if unit == 92 else chr(unit) if unit < 128 else f"\\u{unit:04x}" for unit in units)


def read_controller_port(path: Path) -> int:
    """Return the controller's port from a file of properties; 0 if it has none."""
    return int(_find(path, _CONTROLLER).rpartition(":")[2] or 0)


def read_cluster_id(path: Path) -> str:
    """Return the id of the cluster that a formatted data folder belongs to, from its `meta.properties`."""
    return _find(path, _CLUSTER_ID)


def _find(path: Path, prefix: str) -> str:
    lines = (line for line in path.read_text().splitlines() if line.startswith(prefix))
    return next(lines, prefix).removeprefix(prefix)
