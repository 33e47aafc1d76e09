"""The packages that users import from: every name is there, and importing the package alone is cheap."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import tidemill.errors
from tidemill.core.errors import FencedError, TidemillError

FACES = ["tidemill", "tidemill.dags", "tidemill.sinks", "tidemill.spark", "tidemill.testing", "tidemill.triggers"]


@pytest.mark.parametrize("name", FACES)
def test_every_public_name_is_there_once(name: str) -> None:
    face = importlib.import_module(name)
    exported = [each for names in face._MODULES.values() for each in names]
    assert sorted(exported) == sorted(face.__all__)
    assert set(face.__all__) <= {*dir(face), *face.__all__}
    for each in face.__all__:
        assert getattr(face, each) is getattr(face, each)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        face.Nothing  # noqa: B018


@pytest.mark.parametrize("name", FACES)
def test_importing_a_face_loads_nothing_heavy(name: str) -> None:
    heavy = ("pyspark", "confluent_kafka", "sqlalchemy", "pydantic", "pyarrow", "msgspec")
    code = f"import sys, {name}; print(*[each for each in {heavy!r} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_every_error_a_user_can_meet_is_public() -> None:
    public = {getattr(tidemill.errors, name) for name in tidemill.errors.__all__}
    internal = {FencedError}
    defined = {each for each in TidemillError.__subclasses__() if each.__module__ == TidemillError.__module__}
    assert defined - internal <= public
