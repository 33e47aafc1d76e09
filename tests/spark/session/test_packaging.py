"""Handlers travel with their own code, to a process that has nothing but installed packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.session.packaging import find_own_modules, list_own_folders, pack_handler

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


def test_what_pickles_only_by_name_travels_too(user_folder: Path) -> None:
    project(user_folder, "cached", "1")
    import orders

    assert str(user_folder) in list_own_folders()
    assert unpacked_elsewhere(pack_handler(orders.OrderHandler()), user_folder) == "[2, 'ONE'] ONE"


SHOP = """
    import contextvars, enum, functools, threading, weakref

    import helpers

    LOCK = threading.Lock()
    LOCAL = threading.local()
    CURRENT = contextvars.ContextVar("current", default="none")
    SEEN = weakref.WeakValueDictionary()

    class Rule(enum.Enum):
        A = "a"

        def is_a(self):
            return self is Rule.A

    class Registry:
        lock = threading.RLock()

    REGISTRY = Registry()

    @functools.lru_cache
    def classify(text):
        with LOCK, REGISTRY.lock:
            return Rule.A
"""
SHOP_HANDLER = """
    import sys

    import shop.rules
    import tidemill

    sys.modules["old_shop"] = shop.rules

    class OrderHandler(tidemill.Handler[bytes, None]):
        async def arrange(self, messages, pending):
            import old_shop
            rule = shop.rules.classify("a")
            return [rule.is_a() and old_shop.Rule.A is rule, shop.rules.CURRENT.get()]

        def deserialize_message(self, message):
            return type("Order", (), {"kind": shop.rules.Rule.A})
"""


def shop(folder: Path, *, package: bool) -> None:
    project(folder, "helper", "1")
    (folder / "orders.py").write_text(textwrap.dedent(SHOP_HANDLER))
    (folder / "shop").mkdir()
    (folder / "shop" / "rules.py").write_text(textwrap.dedent(SHOP))
    if package:
        (folder / "shop" / "__init__.py").write_text("from .rules import Rule, classify\n")


@pytest.mark.parametrize("package", [True, pytest.param(False, marks=pytest.mark.long)], ids=["package", "namespace"])
def test_a_module_with_locks_and_two_names_travels(tmp_path: Path, package: bool) -> None:
    shop(tmp_path, package=package)
    packed = packed_by_a_driver(site_packages(tmp_path), tmp_path, "orders")
    for file in tmp_path.rglob("*.py"):
        file.unlink()  # as on another host
    assert unpacked_elsewhere(packed, tmp_path) == "[True, 'none'] A"


@pytest.mark.long
def test_modules_in_an_archive_travel(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    shop(tmp_path / "code", package=True)
    archive = shutil.make_archive(str(tmp_path / "code"), "zip", tmp_path / "code")
    packed = packed_by_a_driver(site_packages(tmp_path), archive, "orders")
    Path(archive).unlink()
    assert unpacked_elsewhere(packed, tmp_path) == "[True, 'none'] A"


def test_an_engine_runs_what_was_packed_although_a_file_is_saved_later(user_folder: Path) -> None:
    project(user_folder, "helper", '"aa!"')
    import orders

    packed = pack_handler(orders.OrderHandler())
    (user_folder / "orders.py").write_text("this is not Python")
    assert unpacked_elsewhere(packed, user_folder, str(user_folder)) == "['b!', 'ONE'] ONE"


@pytest.mark.long
def test_a_process_that_gets_a_second_handler_imports_its_modules_again(user_folder: Path) -> None:
    project(user_folder, "helper", '"aa!"')
    packed = [packed_by_a_driver(site_packages(user_folder), user_folder, "orders")]
    helpers = user_folder / "helpers.py"
    helpers.write_text(helpers.read_text().replace('"b"', '"second"'))
    packed.append(packed_by_a_driver(user_folder / "site-packages", user_folder, "orders"))
    for number, parcel in enumerate(packed):
        (user_folder / str(number)).write_bytes(parcel)
    script = f"""
        import asyncio, os
        from pyspark import cloudpickle
        os.chdir({str(user_folder)!r})
        for name in "0", "0", "1", "0":
            handler = cloudpickle.loads(open(name, "rb").read())
            print(asyncio.run(handler.arrange([], None))[0])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["b!", "b!", "second!", "b!"]


@pytest.mark.long
def test_in_a_process_that_gets_a_handler_twice_its_modules_run_twice_and_libraries_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, own = tmp_path / "libraries", tmp_path / "own"
    (libraries / "tides-1.0.dist-info").mkdir(parents=True)
    (libraries / "tides.py").write_text('print("library")')
    own.mkdir()
    project(own, "helper", '"aa!"')
    (own / "orders.py").write_text('import tides\nprint("handler")\n' + (own / "orders.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    (tmp_path / "packed").write_bytes(
        packed_by_a_driver(site_packages(tmp_path), own, "orders").partition(b"handler\n")[2]
    )
    monkeypatch.delenv("PYTHONPATH")
    script = f"""
        from pyspark import cloudpickle
        for _ in range(2):
            cloudpickle.loads(open({str(tmp_path / "packed")!r}, "rb").read())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["library", "handler", "handler"]


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


def test_an_attribute_of_a_class_that_travels_by_value_is_named() -> None:
    class Held(Handler[bytes, bytes]):
        guard = threading.Lock()

    with pytest.raises(HandlerError, match=r"attribute 'guard' of class Held \(a lock\)"):
        pack_handler(Held())


def test_what_cannot_be_unpickled_is_refused() -> None:
    with pytest.raises(HandlerError, match="not unpickled, which every engine must do: ValueError"):
        pack_handler(Attributes(odd=NotBack()))


def site_packages(folder: Path, *entries: str) -> Path:
    """Make a folder of installed packages, which a Python started below it has on its path."""
    place = folder / "site-packages"
    for entry in entries:
        (place / entry).mkdir(parents=True)
    return place


DRIVER = """
    import site, sys
    installed, nested, name = sys.argv[1:]
    real = site.getsitepackages
    site.getsitepackages = lambda: [*real(), installed]
    sys.path[:0] = [installed] + [nested] * bool(nested)
    from tidemill.spark.session.packaging import list_own_folders, pack_handler
    assert installed not in list_own_folders()
    assert (nested in list_own_folders()) == (bool(nested) and not nested.endswith(".zip"))
    sys.stdout.buffer.write(pack_handler(__import__(name, fromlist=["OrderHandler"]).OrderHandler()))
"""


def packed_by_a_driver(installed: Path, nested: Path | str, name: str) -> bytes:
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(installed), str(nested), name]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


@pytest.mark.long
def test_a_handler_beside_an_installed_package_travels_though_it_is_below_site_packages(tmp_path: Path) -> None:
    place = site_packages(tmp_path, "shop/examples")
    project(place / "shop" / "examples", "helper", '"aa!"')
    packed = packed_by_a_driver(place, place / "shop" / "examples", "orders")
    assert unpacked_elsewhere(packed, tmp_path, str(place)) == "['b!', 'ONE'] ONE"


@pytest.mark.long
def test_a_package_on_a_path_below_site_packages_travels_whole(tmp_path: Path) -> None:
    place = site_packages(tmp_path, "shop/examples/mill")
    project(place / "shop" / "examples" / "mill", "helper", '"aa!"')
    orders = place / "shop" / "examples" / "mill" / "orders.py"
    orders.write_text(orders.read_text().replace("from helpers", "from mill.helpers"))
    (orders.parent / "__init__.py").write_text("from mill.orders import OrderHandler")
    packed = packed_by_a_driver(place, place / "shop" / "examples", "mill")
    assert unpacked_elsewhere(packed, tmp_path) == "['b!', 'ONE'] ONE"


def test_an_installed_handler_travels_by_name(tmp_path: Path) -> None:
    place = site_packages(tmp_path, "shop")
    project(place / "shop", "helper", '"aa!"')
    orders = place / "shop" / "orders.py"
    orders.write_text(orders.read_text().replace("from helpers", "from shop.helpers"))
    packed = packed_by_a_driver(place, "", "shop.orders")
    assert unpacked_elsewhere(packed, tmp_path, str(place)) == "['b!', 'ONE'] ONE"
    assert len(packed) < 300, packed


def test_spark_on_the_path_is_not_the_users(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("pyspark.elsewhere")
    module.__file__ = str(user_folder / "pyspark.zip" / "pyspark" / "elsewhere.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert module not in find_own_modules(), "spark-submit puts its own Spark on the path"


def test_the_modules_of_the_user_are_found() -> None:
    found = find_own_modules()
    assert sys.modules[__name__] in found
    assert sys.modules["tidemill"] not in found
    assert pytest not in found
