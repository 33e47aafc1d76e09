"""Stores and reads DAG files, DAGs and their versions.

Invariants: a DAG belongs to one file. A new version exists only if the structure changed. A file that cannot be parsed
changes only its error. A DAG without a file is inactive, but its runs continue.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, insert, not_, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.structure import DagStructure, ScheduleStructure
from tidemill.core.tasks.structure_changes import describe_changes
from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.dag_calls import DagDetails, DagRecord, GetDag, ListDags, PauseDag
from tidemill.store.calls.service_calls import FileRecord, ListFiles, StoredDag, StoreFile
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import compute_digest, read_structure
from tidemill.store.dag_tables import dag, dag_file, dag_version
from tidemill.store.queries.dags.files.files import check_claim, is_free
from tidemill.store.queries.dags.scheduling.schedule import compute_next
from tidemill.store.queries.triggers.triggers import make_storable

_DAG, _FILE = dag.c, dag_file.c


def store_file(connection: Connection, request: StoreFile, context: CallContext) -> tuple[StoredDag, ...]:
    """Store the DAGs of a file; see `StoreFile`."""
    number = _store_file_row(connection, request, context.now_us)
    if request.error is not None:
        return ()
    stored = []
    kept = []
    for text in request.structures:
        structure = read_structure(text)
        one = _store_dag(connection, number, structure, text, request, context)
        stored.append(one)
        if not one.refused:
            kept.append(structure.id)
    refused = [one.refused for one in stored if one.refused]
    if refused:
        connection.execute(update(dag_file).where(_FILE.id == number).values(error=make_storable("\n".join(refused))))
    gone = and_(_DAG.file_id == number, _DAG.dag_id.not_in(kept), _DAG.active == 1)
    connection.execute(update(dag).where(gone).values(active=0, changed_us=context.now_us))
    context.bells.add(Channel.SCHEDULER)
    return tuple(stored)


def _store_file_row(connection: Connection, request: StoreFile, now_us: int) -> int:
    values = {
        "path": request.path,
        "digest": request.digest,
        "modules": json.dumps(request.modules, sort_keys=True),
        "error": make_storable(request.error),
        "present": 1,
        "parsed_us": now_us,
        "unshared": make_storable(request.unshared),
    }
    if request.session is not None:
        check_claim(connection, request.path, request.session)
        values["session_id"] = request.session
    make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
    statement = make(dag_file).values(values)
    statement = statement.on_conflict_do_update(index_elements=["path"], set_=values).returning(_FILE.id)
    return int(connection.execute(statement).scalar_one())


def _store_dag(
    connection: Connection, file: int, structure: DagStructure, text: bytes, request: StoreFile, context: CallContext
) -> StoredDag:
    for name in (structure.id, *(one.id for one in structure.tasks)):
        if make_storable(name) != name:
            return StoredDag(
                structure.id, refused=f"the id {name!r} has a NUL character or a lone surrogate; rename it"
            )
        if name in (".", "..") or "/" in name:
            return StoredDag(structure.id, refused=f"the id {name!r} must not be '.' or '..' or contain '/'; rename it")
    known = connection.execute(select(dag).where(_DAG.dag_id == structure.id).with_for_update()).first()
    if known is None:
        _insert_dag(connection, file, structure, text, request.paused, context)
        return StoredDag(structure.id, changed=True)
    if known.file_id != file and known.active:
        other = connection.execute(select(_FILE.path).where(_FILE.id == known.file_id)).scalar_one()
        return StoredDag(
            structure.id, refused=f"{other} already defines a DAG {structure.id!r}; give one of them another id"
        )
    digest = compute_digest(text)
    last = select(dag_version.c.digest, dag_version.c.structure).where(dag_version.c.id == known.version_id)
    found = connection.execute(last).one()
    values = _describe(structure) | {"file_id": file, "active": 1, "changed_us": context.now_us}
    changed = found.digest != digest
    if changed and request.reread and known.active:
        return StoredDag(structure.id, differs=describe_changes(read_structure(found.structure), structure))
    if changed:
        number = known.version + 1
        values |= {"version": number}
        values |= {"version_id": _insert_version(connection, known.id, number, digest, text, context.now_us)}
    if read_structure(found.structure).schedule != structure.schedule or (not known.active):
        values |= compute_next(structure.schedule, None, context.now_us, context.now_us)
    connection.execute(update(dag).where(_DAG.id == known.id).values(values))
    return StoredDag(structure.id, changed=changed)


def _insert_dag(
    connection: Connection, file: int, structure: DagStructure, text: bytes, paused: bool, context: CallContext
) -> None:
    values = _describe(structure) | compute_next(structure.schedule, None, context.now_us, context.now_us)
    values |= {
        "dag_id": structure.id,
        "file_id": file,
        "version_id": 0,
        "version": 1,
        "active": 1,
        "paused": int(paused),
        "created_us": context.now_us,
        "changed_us": context.now_us,
    }
    # The version references the DAG, so it is inserted second and its id set afterwards.
    number = connection.execute(insert(dag).values(values).returning(_DAG.id)).scalar_one()
    version = _insert_version(connection, number, 1, compute_digest(text), text, context.now_us)
    connection.execute(update(dag).where(_DAG.id == number).values(version_id=version))


def _insert_version(connection: Connection, number: int, version: int, digest: str, text: bytes, now_us: int) -> int:
    values = {
        "dag": number,
        "number": version,
        "digest": digest,
        "structure": text.decode(),
        "created_us": now_us,
    }
    return int(connection.execute(insert(dag_version).values(values).returning(dag_version.c.id)).scalar_one())


def _describe(structure: DagStructure) -> dict[str, Any]:
    return {
        "max_active_runs": structure.max_active_runs,
        "by_past": int(structure.waits_for_past),
        "schedule": _name_schedule(structure.schedule),
        "tags": json.dumps(structure.tags),
        "label": structure.label,
    }


def _name_schedule(schedule: ScheduleStructure) -> str:
    match schedule.kind:
        case "once":
            return "@once"
        case "cron":
            return schedule.cron
        case "interval":
            return f"{(schedule.interval_us or 0) / 1_000_000:g} s"
    return ""


def list_files(connection: Connection, request: ListFiles, context: CallContext) -> tuple[FileRecord, ...]:
    """Return the present files; see `ListFiles`."""
    statement = select(dag_file).where(_FILE.present == 1).order_by(_FILE.path)
    if request.broken:
        statement = statement.where(_FILE.error.is_not(None))
    if request.removable_by is not None:
        statement = statement.where(or_(_FILE.session_id == request.removable_by, is_free()))
    if request.not_of is not None:
        statement = statement.where(and_(_FILE.session_id != request.not_of, not_(is_free())))
    dags: dict[int, list[str]] = {}
    for file, dag_id in connection.execute(select(_DAG.file_id, _DAG.dag_id).where(_DAG.active == 1)):
        dags.setdefault(file, []).append(dag_id)
    return tuple(
        FileRecord(
            row.path,
            row.digest,
            json.loads(row.modules),
            row.error,
            row.parsed_us,
            tuple(sorted(dags.get(row.id, ()))),
        )
        for row in connection.execute(statement)
    )


def _select_dags() -> Select[Any]:
    return select(dag, _FILE.path, _FILE.unshared).join(dag_file, _FILE.id == _DAG.file_id)


def list_dags(connection: Connection, request: ListDags, context: CallContext) -> Listed[DagRecord]:
    """Return a page of DAGs; see `ListDags`."""
    statement = _select_dags().order_by(_DAG.dag_id).limit(request.limit + 1)
    if not request.inactive:
        statement = statement.where(_DAG.active == 1)
    if request.tag is not None:
        # Searches the JSON list for the quoted tag. LIKE would treat `%` and `_` in the tag as wildcards.
        tag = json.dumps(request.tag)  # as tags are stored: escaped
        statement = statement.where(func.replace(_DAG.tags, tag, "") != _DAG.tags)
    if request.after is not None:
        statement = statement.where(_DAG.dag_id > request.after)
    rows = [_read_dag(row) for row in connection.execute(statement)]
    more = len(rows) > request.limit
    return Listed(tuple(rows[: request.limit]), rows[request.limit - 1].dag_id if more else None)


def get_dag(connection: Connection, request: GetDag, context: CallContext) -> DagDetails | None:
    """Return a DAG with its structure; see `GetDag`."""
    row = connection.execute(_select_dags().where(_DAG.dag_id == request.dag_id)).first()
    if row is None:
        return None
    version = row.version if request.version is None else request.version
    wanted = and_(dag_version.c.dag == row.id, dag_version.c.number == version)
    structure = connection.execute(select(dag_version.c.structure).where(wanted)).scalar()
    return None if structure is None else DagDetails(_read_dag(row), structure.encode(), row.unshared)


def pause_dag(connection: Connection, request: PauseDag, context: CallContext) -> bool:
    """Pause or resume a DAG; see `PauseDag`."""
    row = connection.execute(select(dag).where(_DAG.dag_id == request.dag_id).with_for_update()).first()
    if row is None:
        raise CallRefusedError(
            RefusalKind.UNKNOWN, f"there is no DAG {request.dag_id!r}; list them with `tidemill dags list`"
        )
    if bool(row.paused) is request.paused:
        return False
    values: dict[str, Any] = {"paused": int(request.paused), "changed_us": context.now_us}
    if not request.paused:
        values |= compute_next(_read_schedule(connection, row), row.last_us, context.now_us, context.now_us)
        context.bells.add(Channel.SCHEDULER)
    connection.execute(update(dag).where(_DAG.id == row.id).values(values))
    return True


def _read_schedule(connection: Connection, row: Row[Any]) -> ScheduleStructure:
    text = connection.execute(select(dag_version.c.structure).where(dag_version.c.id == row.version_id)).scalar_one()
    return read_structure(text).schedule


def _read_dag(row: Row[Any]) -> DagRecord:
    return DagRecord(
        row.id,
        row.dag_id,
        row.path,
        row.version,
        bool(row.active),
        bool(row.paused),
        row.next_us,
        row.schedule,
        tuple(json.loads(row.tags)),
        row.label,
    )
