"""The pytest plugin: a real Kafka broker as a fixture.

pytest loads it wherever tidemill is installed, so importing it must be cheap; each fixture imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

# Makes failing assertions of the contract show their values.
pytest.register_assert_rewrite("tidemill.testing.contract")


@pytest.fixture(scope="session")
def embedded_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """Return the running broker that the whole session shares; do not stop it (see `own_kafka`)."""
    from tidemill.testing.kafka import new_broker

    with new_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EmbeddedBroker]]:
    """Return a function that starts a broker for this test alone; the test may stop, kill and restart it.

    The function accepts the keyword arguments of `EmbeddedBroker`; all its brokers are closed after the test.
    """
    from tidemill.testing.kafka import new_broker

    brokers: list[EmbeddedBroker] = []

    def start(**options: Any) -> EmbeddedBroker:
        broker = new_broker(tmp_path_factory.mktemp("own-kafka"), **options)
        brokers.append(broker)
        return broker.start()

    yield start
    for broker in brokers:
        broker.close()
