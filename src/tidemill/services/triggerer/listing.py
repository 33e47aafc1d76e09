"""What the entries of a list mean to a host: which triggers it runs, from where on, and what a changed list changes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidemill.core.triggers.lifecycle import Restart
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reload did: the names that it touched."""

    started: list[str]
    removed: list[str]
    replaced: list[str]


def is_another(old: TriggerSpec, new: TriggerSpec) -> bool:
    """Tell whether an entry has become another trigger under the old name."""
    return (old.classpath, old.kwargs) != (new.classpath, new.kwargs)


def runs_now(record: TriggerRecord) -> bool:
    """Tell whether a trigger is to be run by a host that starts."""
    restart = Restart(record.spec.restart)
    if record.state is TriggerState.FINISHED:
        return restart is Restart.ALWAYS
    if record.state is TriggerState.FAILED:
        return restart is not Restart.NEVER
    return True


def continued(record: TriggerRecord) -> tuple[str, str] | None:
    """Return what a trigger goes on with that did not finish; one that did begins anew."""
    if record.made is None or record.state is TriggerState.FINISHED:
        return None
    classpath, kwargs = json.loads(record.made)
    return classpath, kwargs
