"""What a client of an endpoint sees."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def get(url: str, **headers: str) -> tuple[int, str]:
    """Return the status and the body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask(url: str) -> tuple[int, list[str]]:
    """Return the status of a check, and its reasons."""
    status, body = get(url)
    document: dict[str, Any] = json.loads(body)
    assert document["ok"] is (status == 200)
    return status, document["reasons"]


def parse(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by name and by the values of their labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels.values())
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name}{labels} is there twice"
            found[sample.name][labels] = sample.value
    return found


def scrape(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return what `/metrics` answers."""
    status, text = get(f"{address}/metrics")
    assert status == 200, text
    return parse(text)
