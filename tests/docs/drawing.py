"""Draws boxes, texts and arrows as SVG, readable on light and on dark pages: each picture brings its own background."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: A picture follows the reader's system; where the page does not, its own background keeps it readable.
_STYLE = """<style>
.card{fill:#f7f9fc}.box{fill:#e8eefa;stroke:#5b7bb4}.yours{fill:#e6f4ea;stroke:#4b8b62}.outside{fill:#fbf1e2;stroke:#b98534}
.name{fill:#1f3358;font-size:16px}.text{fill:#47597a;font-size:12px}.line{fill:none;stroke:#5b6b85;stroke-width:1.5}
.head{fill:#5b6b85}
@media (prefers-color-scheme: dark){
.card{fill:#1b202b}.box{fill:#26344f;stroke:#7f9fd8}.yours{fill:#1f3d2b;stroke:#6fb389}.outside{fill:#40321c;stroke:#d3a55c}
.name{fill:#eaf0fb}.text{fill:#bccae3}.line{stroke:#a7b4cc}.head{fill:#a7b4cc}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>"""


def draw_picture(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return a whole picture.

    Args:
        title: What it shows, for those who cannot see it.
        width: In pixels.
        height: In pixels.
        parts: Elements, the first one lowest.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>\n"])


def draw_box(
    name: str, texts: Sequence[str], left: float, top: float, width: float, height: float, kind: str = "box"
) -> list[str]:
    """Return a box with its name and lines of text below it.

    Args:
        name: Its heading.
        texts: Lines below the heading.
        left: In pixels, like the next three.
        top: Its upper edge.
        width: How wide it is.
        height: How high it is.
        kind: `box`, `yours` (the user's code) or `outside` (other systems).
    """
    centre = left + width / 2
    place = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [f'<rect class="{kind}" {place} rx="6"/>', draw_text(name, centre, top + 26, "name")]
    return lines + [draw_text(text, centre, top + 48 + 16 * row) for row, text in enumerate(texts)]


def draw_text(text: str, centre: float, baseline: float, kind: str = "text") -> str:
    """Return a line of text around a centre."""
    place = f'x="{centre:.0f}" y="{baseline:.0f}" text-anchor="middle"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def draw_arrow(*points: tuple[float, float]) -> str:
    """Return an arrow along points."""
    path = " ".join(f"{x:.0f} {y:.0f}" for x, y in points)
    return f'<path class="line" d="M{path}" marker-end="url(#head)"/>'
