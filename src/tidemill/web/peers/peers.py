"""Queries all peers in parallel, each for a limited time, on daemon threads.

Invariants: an answer waits at most 2 s for a peer; only a few threads wait for a peer that hangs. Responses are
validated against the expected model; a mismatch is reported as a problem with the peer's name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from tidemill.config.sections.web_settings import PeerSettings
from tidemill.web.peers.client import PeerClient, PeerError

PEER_SECONDS = 2.0
#: How many threads may wait for one peer.
MAX_WAITING = 4
AnswerT = TypeVar("AnswerT")
Query = Sequence[tuple[str, str]]


@dataclass(slots=True)
class PeerAnswer(Generic[AnswerT]):
    """A peer's answer.

    Attributes:
        name: The peer's name: host and port.
        address: The address of its web UI.
        value: The answer; None if there is none.
        problem: Why there is no answer, or why it is not the newest; ''.
        at: When the peer answered, in seconds since the epoch.
    """

    name: str
    address: str
    value: AnswerT | None = None
    problem: str = ""
    at: float = 0.0


class Peers:
    """Queries peers.

    Args:
        settings: The addresses and tokens of the peers.
        identify: Returns the identity of the recordings shown here; peers that show the same are not counted twice.
        seconds: How long each peer may take.
    """

    def __init__(
        self, settings: Sequence[PeerSettings], identify: Callable[[], str], seconds: float = PEER_SECONDS
    ) -> None:
        self._identify = identify
        self._clients = {client.name: client for client in map(PeerClient, settings)}
        self._waiting = dict.fromkeys(self._clients, 0)
        self._lock = threading.Lock()
        self._seconds = seconds
        self._last: dict[tuple[str, str], PeerAnswer[Any]] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each peer, by name."""
        return {name: client.address for name, client in self._clients.items()}

    def begin(
        self, path: str, queries: Mapping[str, Query], kind: type[AnswerT], *, keep: bool = False
    ) -> Callable[[], list[PeerAnswer[AnswerT]]]:
        """Query some peers; call the returned function to wait for the answers, which come in the order of the peers.

        Args:
            path: The path below `/api/v1`.
            queries: Parameters of the query, by the peer's name; other peers are not queried.
            kind: The expected model.
            keep: Whether a failed query returns the peer's last answer together with the problem.
        """
        ends_at = time.monotonic() + self._seconds
        adapter = TypeAdapter(kind)
        asked = [self._start(name, path, queries[name], adapter) for name in self._clients if name in queries]

        def wait() -> list[PeerAnswer[AnswerT]]:
            answers = []
            for answer, done in asked:
                if done.wait(max(0.0, ends_at - time.monotonic())):
                    answers.append(answer)
                else:
                    problem = f"no answer within {self._seconds:g} s"
                    answers.append(PeerAnswer(answer.name, answer.address, problem=problem))
            if keep:
                for each in answers:
                    self._keep(path, each)
            return answers

        return wait

    def _keep(self, path: str, answer: PeerAnswer[AnswerT]) -> None:
        """Remember a peer's answer, or substitute its last one if it has not answered."""
        key = (answer.name, path)
        if answer.value is not None:
            self._last[key] = answer
        elif (last := self._last.get(key)) is not None:
            answer.value, answer.at = last.value, last.at

    def _start(
        self, name: str, path: str, query: Query, adapter: TypeAdapter[AnswerT]
    ) -> tuple[PeerAnswer[AnswerT], threading.Event]:
        client, done = self._clients[name], threading.Event()
        answer: PeerAnswer[AnswerT] = PeerAnswer(name, client.address)
        with self._lock:
            is_free = self._waiting[name] < MAX_WAITING
            self._waiting[name] += is_free
        if not is_free:
            answer.problem = "earlier requests to the peer are still waiting"
            done.set()
            return answer, done

        def work() -> None:
            try:
                body = client.ask(path, query, self._seconds, self._identify())
                answer.value, answer.at = adapter.validate_json(body), time.time()
            except PeerError as error:
                answer.problem = str(error)
            except ValidationError as error:
                mismatches = error.error_count()
                answer.problem = (
                    f"the response does not match the API ({mismatches} errors); use one version of tidemill"
                )
            except Exception as error:
                answer.problem = f"the response cannot be read ({type(error).__name__})"
            finally:
                with self._lock:
                    self._waiting[name] -= 1
                done.set()

        thread = threading.Thread(target=work, name="tidemill-peer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            with self._lock:
                self._waiting[name] -= 1
            answer.problem = "the system cannot start another thread"
            done.set()
        return answer, done
