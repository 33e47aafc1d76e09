"""What Kafka clients share."""

from __future__ import annotations

import confluent_kafka as ck
import pytest

from tidemill.runtime.kafka.client import BackgroundCall


@pytest.mark.parametrize(
    "raised", [ck.KafkaException(ck.KafkaError(ck.KafkaError._STATE)), TypeError("no place"), SystemExit(1)]
)
def test_a_call_in_the_background_keeps_whatever_error_it_ended_with(raised: BaseException) -> None:
    def call() -> None:
        raise raised

    background = BackgroundCall("test", call)
    assert background.ended.wait(60)
    assert background.error is raised


def test_a_call_in_the_background_that_went_well_has_no_error() -> None:
    background = BackgroundCall("test", lambda: None)
    assert background.ended.wait(60)
    assert background.error is None
