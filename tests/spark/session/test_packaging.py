"""Handlers travel with their own code, to a process that has nothing but installed packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.session.packaging import list_own_folders, pack_handler

HELPERS = """
    import functools, logging, re

    import structlog

    log = structlog.get_logger(__name__)
    old_log = logging.getLogger(__name__)
    PATTERN = re.compile("a+")

    def helper(text):
        log.bind(called=True)
        old_log.debug("called")
        return PATTERN.sub("b", text)

    @functools.lru_cache
    def cached(number):
        return number + 1
"""
HANDLER = """
    import enum

    import pydantic

    import tidemill
    from helpers import {name}

    class Kind(enum.Enum):
        ONE = 1

    class Order(pydantic.BaseModel):
        kind: Kind

    class OrderHandler(tidemill.Handler[Order, dict]):
        async def arrange(self, messages, pending):
            return [{name}({argument}), Order(kind=Kind.ONE).kind.name]
"""
USE = """
    import asyncio, sys
    from pyspark import cloudpickle
    sys.path.extend(sys.argv[2:])
    handler = cloudpickle.loads(open(sys.argv[1], "rb").read())
    message = type("Message", (), {"value": b'{"kind": 1}'})()
    print(asyncio.run(handler.arrange([], None)), handler.deserialize_message(message).kind.name)
"""


def project(folder: Path, name: str, argument: str) -> None:
    (folder / "helpers.py").write_text(textwrap.dedent(HELPERS))
    (folder / "orders.py").write_text(textwrap.dedent(HANDLER.format(name=name, argument=argument)))


def unpacked_elsewhere(packed: bytes, folder: Path, *paths: str) -> str:
    (folder / "packed").write_bytes(packed)
    command = [sys.executable, "-c", textwrap.dedent(USE), str(folder / "packed"), *paths]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("orders", "helpers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_the_handlers_own_modules_travel_with_it(user_folder: Path) -> None:
    project(user_folder, "helper", '"aa!"')
    import orders  # type: ignore[import-not-found]

    packed = pack_handler(orders.OrderHandler())
    assert unpacked_elsewhere(packed, user_folder) == "['b!', 'ONE'] ONE"


def test_what_pickles_only_by_name_is_found_in_the_drivers_folders(user_folder: Path) -> None:
    project(user_folder, "cached", "1")
    import orders

    assert str(user_folder) in list_own_folders()
    packed = pack_handler(orders.OrderHandler())
    assert unpacked_elsewhere(packed, user_folder, *list_own_folders()) == "[2, 'ONE'] ONE"


def test_a_handler_of_the_main_module_travels_too(user_folder: Path, tmp_path: Path) -> None:
    project(user_folder, "helper", '"aa!"')
    script = f"""
        import sys
        sys.path.insert(0, {str(user_folder)!r})
        exec(open({str(user_folder / "orders.py")!r}).read())
        from tidemill.spark.session.packaging import pack_handler
        sys.stdout.buffer.write(pack_handler(OrderHandler()))
    """
    packed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True)
    assert unpacked_elsewhere(packed.stdout, user_folder) == "['b!', 'ONE'] ONE"


class Attributes(Handler[bytes, bytes]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Held(Handler[bytes, bytes]):
    guard = threading.Lock()


class NotBack:
    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_attributes_travel(user_folder: Path) -> None:
    packed = pack_handler(Attributes(numbers=[1, 2]))
    from pyspark import cloudpickle

    assert cloudpickle.loads(packed).numbers == [1, 2]


def test_an_attribute_that_cannot_be_pickled_is_named() -> None:
    with (
        open(__file__, "rb") as file,
        pytest.raises(HandlerError, match=r"attribute 'file' of Attributes \(a BufferedReader\).*on_ready"),
    ):
        pack_handler(Attributes(fine=1, file=file))


def test_a_class_attribute_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(HandlerError, match=r"attribute 'guard' of class Held \(a lock\)"):
        pack_handler(Held())


def test_what_cannot_be_unpickled_is_refused() -> None:
    with pytest.raises(HandlerError, match="not unpickled as engines have to: ValueError"):
        pack_handler(Attributes(odd=NotBack()))
