"""The control socket of a pipeline's driver, with which clients on this machine find and control the pipeline.

The drivers of one consumer group on one cluster share the prefix of their sockets' names, whatever their workers are
called, so that a configuration finds all of them. A table of names and functions lists the possible requests.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.sockets import control_socket
from tidemill.runtime.sockets.control_socket import ControlSocket, Document, ProcessAnswers, prefix_of

KIND = "pipeline"
#: Carries out a request, given its whole document; called on the socket's loop, which it must not block.
Request = Callable[[Document], Document | Awaitable[Document]]


def pipeline_socket(kafka: KafkaSettings, worker: str, requests: Mapping[str, Request]) -> ControlSocket:
    """Return the socket of a driver.

    Args:
        kafka: The section as it was configured.
        worker: The worker's name.
        requests: The function for each request, by the name that clients send as `do`.
    """

    async def answer(document: Document) -> Document:
        about = {"worker": worker, "pid": os.getpid()}
        carry_out = requests.get(str(document.get("do")))
        if carry_out is None:
            return about | {"error": f"this version does not know {document.get('do')!r}"}
        said = carry_out(document)
        return about | (await said if inspect.isawaitable(said) else said)

    return ControlSocket(_prefix(kafka), answer)


def ask_pipelines(kafka: KafkaSettings | None, request: Document, seconds: float) -> ProcessAnswers:
    """Send a request to the drivers of a pipeline on this machine.

    Args:
        kafka: Identifies the pipeline; None means all pipelines of this user.
        request: The document to send; `do` names the request.
        seconds: How long to wait for an answer.
    """
    return control_socket.ask(f"{KIND}." if kafka is None else _prefix(kafka), request, seconds)


def release_brakes(kafka: KafkaSettings) -> list[Document]:
    """Release the brakes of a pipeline's engines; see `request_action`."""
    return request_action(kafka, {"do": "release"})


def request_action(kafka: KafkaSettings, request: Document) -> list[Document]:
    """Send a request to a pipeline, and return the answer of each driver on this machine.

    Raises:
        RemoteError: There is no driver, or one does not answer.
    """
    answers = ask_pipelines(kafka, request, control_socket.ANSWER_SECONDS)
    where = f"consumer group {kafka.consumer_group!r} on {kafka.brokers}"
    if answers.silent:
        raise RemoteError(
            f"a pipeline of {where} did not answer within {control_socket.ANSWER_SECONDS:g} s; its log shows what is "
            "blocking it"
        )
    if not answers.reports:
        raise RemoteError(
            f"no pipeline of {where} is running on this machine as this user; use the configuration and the "
            "environment that it was started with"
        )
    return answers.reports


def _prefix(kafka: KafkaSettings) -> str:
    return prefix_of(KIND, f"{kafka.brokers}\0{kafka.consumer_group}".encode())
