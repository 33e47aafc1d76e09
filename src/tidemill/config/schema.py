"""The JSON schema of the configuration file, for editors."""

from __future__ import annotations

import json
from typing import Any

from tidemill.config.settings import Settings


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of the settings; the result is deterministic."""
    schema = Settings.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tidemill configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def format_schema() -> str:
    """Return the schema as sorted JSON text that ends with a newline."""
    return json.dumps(build_schema(), indent=2, sort_keys=True) + "\n"
