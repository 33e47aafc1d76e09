"""Draws the house: the layers that CI checks, with the rooms inside them. `python -m tests.docs.house` writes it."""

from __future__ import annotations

import configparser
from pathlib import Path

from tests.docs.drawing import draw_box, draw_picture

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/explanation/house.svg"
_SOURCES = ROOT / "src/tidemill"
_WIDTH, _GAP, _HEIGHT = 960, 8, 64


def read_layers() -> list[list[str]]:
    """Return the rooms of each layer, from the top."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:rooms"]["layers"].split("\n")
    return [[room.strip().removeprefix("tidemill.") for room in line.split("|")] for line in lines if line.strip()]


def list_rooms(room: str) -> list[str]:
    """Return the rooms inside a room."""
    inside = [path.name for path in (_SOURCES / room).iterdir() if (path / "__init__.py").is_file()]
    return sorted(inside)


def draw_house() -> str:
    """Return the picture as SVG."""
    layers = read_layers()
    parts: list[str] = []
    for row, rooms in enumerate(layers):
        width = (_WIDTH - _GAP) / len(rooms) - _GAP
        for column, room in enumerate(rooms):
            left, top = _GAP + column * (width + _GAP), _GAP + row * (_HEIGHT + _GAP)
            parts += draw_box(room, [" · ".join(list_rooms(room))], left, top, width, _HEIGHT)
    title = "The rooms of tidemill: each imports only what is below it"
    return draw_picture(title, _WIDTH, len(layers) * (_HEIGHT + _GAP) + _GAP, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw_house())
