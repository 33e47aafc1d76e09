"""What a message lets others do to it."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from tidemill.runtime.kafka.source_message import SourceMessage, set_field


def test_only_the_payload_of_a_message_can_be_changed() -> None:
    message = SourceMessage("orders", 3, 17, b"key", b"value")
    message.payload = {"parsed": True}
    for name in SourceMessage.__struct_fields__:
        if name != "payload":
            with pytest.raises(AttributeError, match=f"{name} of a message cannot be changed, only its payload"):
                setattr(message, name, 1)
        with pytest.raises(AttributeError, match=f"{name} of a message cannot be removed"):
            delattr(message, name)
    assert message == SourceMessage("orders", 3, 17, b"key", b"value", payload={"parsed": True})


def test_whoever_parses_a_message_sets_what_came_of_it() -> None:
    message = SourceMessage("orders", 3, 17)
    set_field(message, "payload", 1)
    set_field(message, "parse_error", "not JSON")
    assert (message.payload, message.parse_error) == (1, "not JSON")


def test_a_message_can_be_copied_and_pickled() -> None:
    message = SourceMessage("orders", 3, 17, b"key", b"value", (("h", None),), 5, [1], "no", 7)
    for other in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert other == message
    assert msgspec.structs.replace(message, key=b"other").key == b"other"
