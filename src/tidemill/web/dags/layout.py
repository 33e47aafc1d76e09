"""Lays out a DAG's graph in layers with few crossings. Pure.

A layer holds the tasks whose longest path from a first task has the same length. Edges that cross layers pass through
points that are sorted like tasks, so that no edge runs behind a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 148, 34
_GAP_ALONG, _GAP_ACROSS = 52, 14
#: The space that an edge takes in a layer that it crosses.
_LANE = 10
_MARGIN = 8
_SWEEPS = 6
#: Larger graphs are not readable.
MAX_TASKS = 300
MAX_EDGES = 1500


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A task with its upper left corner."""

    id: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """An edge. `path` is its SVG path, `middle` the position of its label."""

    before: str
    after: str
    path: str
    middle: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A laid out graph. `down`: whether layers are rows, not columns."""

    width: int
    height: int
    nodes: Sequence[GraphNode]
    edges: Sequence[GraphEdge]
    down: bool


_Point = tuple[str, str, int]  # a task, or the point where an edge crosses a layer


def find_layers(upstream: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the layer of each task, from 0.

    Example:
        >>> find_layers({"c": ["a", "b"], "b": ["a"], "a": []})
        {'a': 0, 'b': 1, 'c': 2}
    """
    found: dict[str, int] = {}
    after: dict[str, list[str]] = {name: [] for name in upstream}
    left = {name: len(befores) for name, befores in upstream.items()}
    for name, befores in upstream.items():
        for before in befores:
            after[before].append(name)
    ready = [name for name in upstream if not left[name]]
    for name in ready:
        found[name] = max((found[before] + 1 for before in upstream[name]), default=0)
        for follower in after[name]:
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return found


def list_in_order(upstream: Mapping[str, Sequence[str]], picture: Picture | None) -> list[str]:
    """Return the tasks in graph order: upstream tasks first, otherwise as in the picture.

    Args:
        upstream: The direct upstream tasks of each task; acyclic.
        picture: A layout with columns as layers; None: there are too many tasks.

    Example:
        >>> list_in_order({"a_report": ["load"], "load": ["extract"], "extract": []}, None)
        ['extract', 'load', 'a_report']
    """
    if picture is not None:
        return [node.id for node in sorted(picture.nodes, key=lambda node: (node.x, node.y))]
    depth = find_layers(upstream)
    return sorted(depth, key=lambda name: (depth[name], name))


def draw(upstream: Mapping[str, Sequence[str]], *, down: bool) -> Picture | None:
    """Return the layout of a graph; None if it is too large.

    Args:
        upstream: The direct upstream tasks of each task; acyclic.
        down: Whether layers are rows, for narrow windows.
    """
    if len(upstream) > MAX_TASKS or sum(map(len, upstream.values())) > MAX_EDGES:
        return None
    depth = find_layers(upstream)
    layers: list[list[_Point]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in sorted(depth):
        layers[depth[name]].append((name, "", 0))
    chains: list[tuple[str, str, list[_Point]]] = []
    for name in sorted(upstream):
        for before in upstream[name]:
            passed: list[_Point] = [(before, name, layer) for layer in range(depth[before] + 1, depth[name])]
            for point in passed:
                layers[point[2]].append(point)
            chains.append((before, name, [(before, "", 0), *passed, (name, "", 0)]))
    _order(layers, chains)
    return _draw(layers, chains, down=down)


def _order(layers: list[list[_Point]], chains: list[tuple[str, str, list[_Point]]]) -> None:
    """Sort each layer by the mean position of its neighbours, in alternating sweeps."""
    before: dict[_Point, list[_Point]] = {}
    after: dict[_Point, list[_Point]] = {}
    for _, _, points in chains:
        for one, other in pairwise(points):
            after.setdefault(one, []).append(other)
            before.setdefault(other, []).append(one)
    for sweep in range(_SWEEPS):
        neighbours = after if sweep % 2 else before
        for layer in reversed(layers) if sweep % 2 else layers:
            positions = {point: index for each in layers for index, point in enumerate(each)}

            def weigh(point: _Point, neighbours: dict[_Point, list[_Point]], positions: dict[_Point, int]) -> float:
                near = neighbours.get(point)
                return sum(positions[one] for one in near) / len(near) if near else positions[point]

            weights = {point: weigh(point, neighbours, positions) for point in layer}
            layer.sort(key=weights.__getitem__)


def _draw(layers: list[list[_Point]], chains: list[tuple[str, str, list[_Point]]], *, down: bool) -> Picture:
    along, across = (HEIGHT, WIDTH) if down else (WIDTH, HEIGHT)
    extents = [sum(_LANE if point[1] else across for point in layer) + _GAP_ACROSS * len(layer) for layer in layers]
    breadth = max(extents, default=0)
    #: The centre of each point across its layer, and the start of its layer along the graph.
    spots: dict[_Point, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        at = (breadth - extents[number]) // 2 + _MARGIN
        for point in layer:
            room = _LANE if point[1] else across
            spots[point] = (_MARGIN + number * (along + _GAP_ALONG), at + room // 2)
            at += room + _GAP_ACROSS
    nodes = []
    for layer in layers:
        for point in layer:
            if not point[1]:
                begin, middle = spots[point]
                corner = (middle - across // 2, begin) if down else (begin, middle - across // 2)
                nodes.append(GraphNode(point[0], *corner))
    edges = [_draw_edge(one, other, [spots[point] for point in points], along, down) for one, other, points in chains]
    length = len(layers) * (along + _GAP_ALONG) - _GAP_ALONG + 2 * _MARGIN
    size = (breadth + 2 * _MARGIN, length)
    return Picture(*(size if down else (size[1], size[0])), nodes, edges, down)


def _draw_edge(before: str, after: str, spots: list[tuple[int, int]], along: int, down: bool) -> GraphEdge:
    def write(far: float, wide: float) -> str:
        return f"{wide:g} {far:g}" if down else f"{far:g} {wide:g}"

    begin, wide = spots[0][0] + along, spots[0][1]
    parts = [f"M{write(begin, wide)}"]
    for number, (start, middle) in enumerate(spots[1:], 1):
        half = (begin + start) / 2
        parts.append(f"C{write(half, wide)} {write(half, middle)} {write(start, middle)}")
        if number < len(spots) - 1:  # straight through the layer that the edge crosses
            parts.append(f"L{write(start + along, middle)}")
        begin, wide = start + along, middle
    far, across = (spots[0][0] + along + spots[1][0]) // 2, (spots[0][1] + spots[1][1]) // 2
    return GraphEdge(before, after, "".join(parts), (across, far) if down else (far, across))
