"""An SQS server for tests: moto's, as a process that ends with this one."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.session import get_session

from tidemill.runtime.embedded.broker import free_port

_PROGRAM = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whatever ends the tests ends the server
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = Path(tmp_path_factory.mktemp("moto"), "log")
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(port)], stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=30).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


class SqsServer:
    """The server, and a client that looks at its queues from outside."""

    def __init__(self, url: str, client: Any) -> None:
        self.url = url
        self.client = client

    async def make_queue(self, fifo: bool = False, **attributes: str) -> str:
        name = f"q-{uuid.uuid4().hex[:10]}"
        if fifo:
            name += ".fifo"
            attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "false", **attributes}
        await self.client.create_queue(QueueName=name, Attributes=attributes)
        return name

    async def address(self, name: str) -> str:
        return str((await self.client.get_queue_url(QueueName=name))["QueueUrl"])

    async def send(self, name: str, body: str, group: str | None = None, **attributes: Any) -> str:
        extra = {} if group is None else {"MessageGroupId": group, "MessageDeduplicationId": uuid.uuid4().hex}
        sent = await self.client.send_message(
            QueueUrl=await self.address(name), MessageBody=body, MessageAttributes=attributes, **extra
        )
        return str(sent["MessageId"])

    async def count(self, name: str) -> int:
        """Return how many messages a queue holds, invisible ones included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = await self.client.get_queue_attributes(QueueUrl=await self.address(name), AttributeNames=names)
        return sum(int(answer["Attributes"][name]) for name in names)

    async def read(self, name: str) -> list[dict[str, Any]]:
        """Return messages of a queue, and take them out."""
        url = await self.address(name)
        answer = await self.client.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1, MessageAttributeNames=["All"]
        )
        for message in answer.get("Messages", ()):
            await self.client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return list(answer.get("Messages", ()))


@pytest.fixture
async def sqs_server(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqsServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    async with get_session().create_client("sqs", region_name="eu-central-1", endpoint_url=moto_url) as client:
        yield SqsServer(moto_url, client)
