"""What is written is what prometheus-client would write, as its own parsers read it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.exposition import write_families
from tidemill.runtime.metrics.families import Distribution, Family

DONE = Definition("done_total", Kind.COUNTER, 'Done, "so\\to say".\nReally.', ("engine", "partition"))
LEVEL = Definition("level_info_total", Kind.GAUGE, "A gauge, in spite of its name.")
TOOK = Definition("took_seconds", Kind.HISTOGRAM, "Took.", ("engine",))
WAITED = Definition("waited_seconds", Kind.HISTOGRAM, "Waited.")
ABOUT = Definition("worker_info", Kind.INFO, "Who.", ("worker_id", "version"))
BOUNDS = (0.005, 1.0, 300.0)

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e"))
COUNTS = st.lists(st.integers(0, 10**12), min_size=4, max_size=4)
HISTOGRAMS = st.builds(Distribution, st.just(BOUNDS), COUNTS, st.floats(0, 1e12))


def build(family: Family) -> Metric:
    """Return the same as prometheus-client has it."""
    definition, samples = family.definition, family.samples
    name, labels = definition.full_name, definition.labels
    if definition.kind is Kind.INFO:
        info = InfoMetricFamily(name.removesuffix("_info"), definition.help)
        for values, _ in samples:
            info.add_metric((), dict(zip(labels, values, strict=True)))
        return info
    if definition.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, definition.help, labels=labels)
        for values, value in samples:
            assert isinstance(value, Distribution)
            sums = [float(sum(value.counts[: place + 1])) for place in range(len(value.counts))]
            histogram.add_metric(values, list(zip([*map(repr, value.bounds), "+Inf"], sums, strict=True)), value.total)
        return histogram
    make = CounterMetricFamily if definition.kind is Kind.COUNTER else GaugeMetricFamily
    numbers = make(name, definition.help, labels=labels)
    for values, value in samples:
        numbers.add_metric(values, value)  # type: ignore[arg-type]
    return numbers


class Built(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return [build(family) for family in self.families]


def check(families: list[Family]) -> None:
    registry = CollectorRegistry()
    registry.register(Built(families))
    text, expected = write_families(families).decode(), generate_latest(registry).decode()
    assert list(parse_text(text)) == list(parse_text(expected))
    text, expected = write_families(families, is_openmetrics=True).decode(), generate_openmetrics(registry).decode()
    assert list(parse_openmetrics(text + "# EOF\n")) == list(parse_openmetrics(expected))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.tuples(TEXTS, TEXTS), st.integers(0, 2**53)), unique_by=lambda sample: sample[0]),
    st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False)),
    st.lists(st.tuples(st.tuples(TEXTS), HISTOGRAMS), unique_by=lambda sample: sample[0]),
    HISTOGRAMS,
    st.tuples(TEXTS, TEXTS),
)
def test_both_formats_say_what_prometheus_client_says(done, level, took, waited, about) -> None:  # type: ignore[no-untyped-def]
    check(
        [
            Family(ABOUT, [(about, 1)]),
            Family(DONE, done),
            Family(LEVEL, [((), level)]),
            Family(TOOK, took),
            Family(WAITED, [((), waited)]),
        ]
    )


@pytest.mark.parametrize("value", ["%s", "100 %", "%(x)d", 'a"b', "a\\", "a\nb", "\0", "", "ä€𝄞"])
def test_a_label_is_never_more_than_a_text(value: str) -> None:
    check([Family(DONE, [((value, value), 1)]), Family(TOOK, [((value,), Distribution(BOUNDS, (1, 2, 3, 4), 0.5))])])


@pytest.mark.parametrize(("value", "written"), [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")])
def test_what_is_not_a_number_is_written_as_prometheus_reads_it(value: float, written: str) -> None:
    assert write_families([Family(LEVEL, [((), value)])]).decode().splitlines()[-1] == f"{LEVEL.full_name} {written}"


def test_a_metric_without_series_is_still_described() -> None:
    lines = write_families([Family(TOOK, [])]).decode().splitlines()
    assert lines == ["# HELP tidemill_took_seconds Took.", "# TYPE tidemill_took_seconds histogram"]
