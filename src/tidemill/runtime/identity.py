"""The identity of workers and engines: names that survive restarts, and ids that do not.

The worker's name becomes a part of Kafka ids and file names, so it is limited to the characters that Kafka allows in a
topic's name. No I/O except reading the environment and the host's name.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Mapping

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError

_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")
#: `group.instance.id` contains group, worker and slot; Kafka refuses ids beyond 249 characters.
MAX_NAME_LENGTH = 100


class EngineIdentity(msgspec.Struct, frozen=True):
    """The identity of one engine.

    Attributes:
        worker: The worker's name, unique in its consumer group.
        slot: The number of the engine's slot in its pipeline, from 0; it survives restarts of the engine.
        engine_id: New for every start; the value of TIDEMILL_ENGINE_ID in every process that it starts.
        group: The consumer group.
        run_token: Increases with every start of an engine in this slot; the newest one wins.
    """

    worker: str
    slot: int
    engine_id: str
    group: str
    run_token: int = 0

    @property
    def instance_id(self) -> str:
        """The engine's static member id in the consumer group."""
        return f"{self.group}.{self.worker}.{self.slot}"


def new_engine_id() -> str:
    """Return an id that no other engine has."""
    return uuid.uuid4().hex


def find_worker_name(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return this process's worker name: from `settings.worker_name_env`, otherwise the host's name.

    Raises:
        ConfigError: The name cannot be part of a Kafka id.
    """
    variable = settings.worker_name_env
    name = environ.get(variable, "").strip()
    if name:
        return _check_name(name, f"the worker name {name!r} (from {variable})", f"change {variable}")
    host = socket.gethostname().strip()
    return _check_name(host, f"the worker name {host!r} (this host's name)", f"set {variable} to another name")


def cluster_name(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the cluster's name: the value of the variable `cluster_name_env`, otherwise `cluster_name`."""
    if settings.cluster_name_env:
        name = environ.get(settings.cluster_name_env, "").strip()
        if name:
            return name
    return settings.cluster_name


def _check_name(name: str, what: str, how: str) -> str:
    if not name or len(name) > MAX_NAME_LENGTH or not _ALLOWED.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be used in Kafka ids: 1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-' "
            f"are allowed; {how}"
        )
    return name
