"""Writes docs/reference/configuration.md from the settings: `python -m tests.docs.reference`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from tests.docs.snippets import ROOT

from tidemill.config.settings import Settings

PAGE = ROOT / "docs/reference/configuration.md"

HEAD = """# Configuration

The configuration is one YAML file (the argument, or the one that `TIDEMILL_CONFIG` names), with overrides from the
environment: `TIDEMILL_KAFKA__BROKERS=host:9092` sets `kafka.brokers`. An unknown key is an error that names its
location and the nearest known key. Secrets are masked wherever configuration is shown. `tidemill config show` prints
the effective values.

```yaml
kafka:
  brokers: localhost:9092
  source_topic: orders
  consumer_group: order-workers
executor:
  binary_path: /usr/bin/wc
  max_executors: 8
sinks:
  kafka:
    results: {topic: order-results}
  filesystem:
    log: {base_path: output}
```

This page is generated from the code: `python -m tests.docs.reference`.
"""


TABLE = ("| key | default | |", "| --- | --- | --- |")


def rows(model: type[BaseModel], place: str) -> list[str]:
    """Return the table rows of a section, and of those in it."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        where = f"{place}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += rows(kind, f"{where}.")
            continue
        inner: Any = getattr(kind, "__args__", (None, None))
        if len(inner) == 2 and isinstance(inner[1], type) and issubclass(inner[1], BaseModel):
            found += rows(inner[1], f"{where}.<name>.")
            continue
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        found.append(f"| `{where}` | {default} | {field.description or ''} |")
    return found


def page() -> str:
    """Return the whole page."""
    text = [HEAD]
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            about = (kind.__doc__ or "").splitlines()[0]
            text += [
                f"## {name}",
                "",
                about,
                "",
                "| key | default | |",
                "| --- | --- | --- |",
                *rows(kind, f"{name}."),
                "",
            ]
    top = [
        f"| `{name}` | `{json.dumps(field.default)}` | {field.description or ''} |"
        for name, field in Settings.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    ]
    text += ["## Names", "", *TABLE, *top, ""]
    return "\n".join(text)


if __name__ == "__main__":
    PAGE.write_text(page())
