"""The pictures of the documentation are those that the code draws, and can be read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.docs import house, sequences, way
from tests.docs.snippets import ROOT

DRAWN = [
    (way.MESSAGE, way.draw_message),
    (way.ENGINE, way.draw_engine),
    (house.PICTURE, house.draw_house),
    (sequences.DEFERRING, sequences.draw_deferring),
    (sequences.STREAM, sequences.draw_stream),
]


@pytest.mark.parametrize(("picture", "draw"), DRAWN, ids=[picture.stem for picture, _ in DRAWN])
def test_a_picture_is_the_one_that_the_code_draws(picture: Path, draw: Callable[[], str]) -> None:
    assert picture.read_text() == draw(), f"draw it again: python -m {draw.__module__}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/explanation").glob("*.svg")), ids=lambda picture: picture.stem)
def test_a_picture_has_a_title_and_colors_for_light_and_dark(picture: Path) -> None:
    svg = ElementTree.parse(picture).getroot()
    names = {"svg": "http://www.w3.org/2000/svg"}
    style = svg.findtext("svg:style", namespaces=names) or ""
    light, _, dark = style.partition("prefers-color-scheme: dark")
    used = {part.get("class") for part in svg.iter() if part.get("class")}
    assert svg.findtext("svg:title", namespaces=names)
    assert used
    assert all(f".{name}{{" in light and f".{name}{{" in dark for name in used)
    background = svg.find("svg:rect", names)
    assert background is not None
    assert svg.get("viewBox") == f"0 0 {background.get('width')} {background.get('height')}"
