"""How a running pipeline is found and controlled on this machine: its driver's control socket.

The drivers of one consumer group on one cluster share the beginning of their sockets' names, whatever their workers are
called, so that a configuration finds all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tidemill.config.kafka_settings import KafkaSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime import control_socket
from tidemill.runtime.control_socket import ControlSocket, prefix_of


def pipeline_socket(kafka: KafkaSettings, worker: str, release: Callable[[], list[dict[str, Any]]]) -> ControlSocket:
    """Return the socket of a driver.

    Args:
        kafka: As it was configured.
        worker: The worker's name.
        release: Releases the brakes that are on, and returns them; called on the socket's loop.
    """

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        about = {"worker": worker, "pid": os.getpid()}
        if request.get("do") == "release":
            return about | {"engines": release()}
        return about | {"error": f"this version does not know {request.get('do')!r}"}

    return ControlSocket(_prefix(kafka), answer)


def release_brakes(kafka: KafkaSettings) -> list[dict[str, Any]]:
    """Release the brakes of a pipeline's engines, and return what each driver on this machine answered.

    Raises:
        RemoteError: There is none, or one does not answer.
    """
    answers = control_socket.ask(_prefix(kafka), {"do": "release"})
    where = f"consumer group {kafka.consumer_group!r} on {kafka.brokers}"
    if answers.silent:
        raise RemoteError(
            f"a pipeline of {where} does not answer within {control_socket.ANSWER_SECONDS:g} s; look into its log for "
            "what blocks it"
        )
    if not answers.reports:
        raise RemoteError(
            f"no pipeline of {where} runs on this machine as this user; give the configuration, and the environment, "
            "that it was started with"
        )
    return answers.reports


def _prefix(kafka: KafkaSettings) -> str:
    return prefix_of("pipeline", f"{kafka.brokers}\0{kafka.consumer_group}".encode())
