"""Reads the limits of mapped tasks from the settings."""

from __future__ import annotations

from tidemill.config.sections.dags_settings import DagsSettings
from tidemill.store.calls.service_calls import MapLimits


def build_map_limits(settings: DagsSettings) -> MapLimits:
    """Return the limits that a scheduler gives to the maps that open."""
    return MapLimits(settings.max_outstanding, settings.max_map_length, settings.max_backlog)
