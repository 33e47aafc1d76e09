"""Draws the house: the layers that CI checks, with the rooms inside them. `python -m tests.docs.house` writes it."""

from __future__ import annotations

import configparser
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/explanation/house.svg"
_SOURCES = ROOT / "src/tidemill"
_WIDTH, _GAP, _HEIGHT, _HEAD = 960, 8, 64, 22


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
    height = len(layers) * (_HEIGHT + _GAP) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, rooms in enumerate(layers):
        width = (_WIDTH - _GAP) / len(rooms) - _GAP
        for column, room in enumerate(rooms):
            left, top = _GAP + column * (width + _GAP), _GAP + row * (_HEIGHT + _GAP)
            lines += _draw_room(room, left, top, width)
    return "\n".join([*lines, "</svg>\n"])


def _draw_room(room: str, left: float, top: float, width: float) -> list[str]:
    centre = left + width / 2
    inside = " · ".join(list_rooms(room))
    box = f'x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_HEIGHT}"'
    return [
        f'<rect {box} rx="6" fill="#eef3fb" stroke="#5b7bb4"/>',
        _draw_text(room, centre, top + _HEAD + 4, 16, "#1f3358"),
        _draw_text(inside, centre, top + 2 * _HEAD + 4, 12, "#47597a"),
    ]


def _draw_text(text: str, centre: float, baseline: float, size: int, colour: str) -> str:
    place = f'x="{centre:.0f}" y="{baseline:.0f}" text-anchor="middle"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw_house())
