"""Models of the REST API for redrives; the page shows the same."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tidemill.config.kafka_names import check_topic
from tidemill.config.redaction import redact_text
from tidemill.core.deadletters.redrive import LetterCriteria, Target
from tidemill.deadletters.letter import LetterKind
from tidemill.deadletters.redrive.history import PastRedrive
from tidemill.deadletters.redrive.run import RedriveOrder
from tidemill.web.letters.redrive_desk import RedriveState, name_target
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import parse_time

#: The number of rows of a page.
MAX_IDS = 100
_MILLION = 1_000_000
Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=MAX_IDS)]


class RedriveRequest(BaseModel):
    """The letters to redrive, and their target."""

    model_config = ConfigDict(extra="forbid")
    ids: Words = Field(default=[], description="Prefixes of the letters' ids.")
    kinds: Words = Field(default=[], description=", ".join(kind.value for kind in LetterKind))
    sinks: Words = Field(default=[], description="Sinks, as name or type.name.")
    keys: Words = Field(default=[], description="Keys of the letters' messages.")
    text: Annotated[str, Field(max_length=1024)] = Field(default="", description="A text anywhere in the letter.")
    since: Annotated[str, Field(max_length=40)] = Field(
        default="",
        description="An absolute time such as 2026-05-01T12:00; a redrive is continued only with the same filters.",
    )
    until: Annotated[str, Field(max_length=40)] = Field(default="", description="An absolute time, like since.")
    to: Annotated[str, Field(min_length=1, max_length=260)] = Field(
        default="source", description="source, sink, or a topic; topic:NAME for a topic of that name."
    )
    rate: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None, description="Messages or payloads per second; null: no limit."
    )
    limit: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        default=None, description="The maximum number of letters."
    )
    restart: bool = Field(default=False, description="Also send letters that the same redrive has sent before.")


class Confirmation(BaseModel):
    """The user's confirmation of a dry run."""

    model_config = ConfigDict(extra="forbid")
    letters: int = Field(description="How many letters the dry run counted.")


class Accepted(BaseModel):
    """The answer to an accepted request."""

    text: str


class Count(BaseModel):
    """A number of letters."""

    what: str
    letters: int


class UnsentLetterView(BaseModel):
    """A letter that was not sent."""

    letter_id: str
    why: str


class RedriveReport(BaseModel):
    """A redrive of this process, or the dry run of one."""

    redrive_id: str
    number: int
    dry_run: bool
    to: str
    filters: dict[str, Any]
    rate: float | None
    by: str
    began_at: float
    ended_at: float | None = Field(description="Seconds since the epoch; null while it runs.")
    ended: str = Field(description="end, limit, stopped or error; '' while it runs.")
    error: str
    resumed: bool = Field(description="Whether it continues an earlier redrive with the same filters and target.")
    total: int = Field(description="Records to read.")
    read: int
    letters: int = Field(description="Letters sent; in a dry run, letters that would be sent.")
    messages: int = Field(description="Messages or payloads of these letters.")
    not_sent: list[Count] = Field(description="Matching letters that were not sent, by reason.")
    failed: list[UnsentLetterView] = Field(description="The first failures.")
    lost: int = Field(description="Messages that cannot be sent because they did not fit into their letters.")
    destinations: list[Count] = Field(description="In a dry run: letters by target.")


class Past(BaseModel):
    """A redrive as its cursor describes it; any process may have run it."""

    to: str
    filters: dict[str, Any]
    first_at: float
    last_at: float
    records: int = Field(description="Records of dead letters that it has read.")
    unsent: int = Field(description="Letters that it selected but did not send.")


class RedriveList(BaseModel):
    """The redrives of this process, newest first, and all redrives with a stored cursor."""

    here: list[RedriveReport]
    past: list[Past]


def read_order(order: RedriveRequest, now: float) -> RedriveOrder:
    """Return the redrive order.

    Raises:
        Problem: A field is invalid.
    """
    known = [kind.value for kind in LetterKind]
    if wrong := [kind for kind in order.kinds if kind not in known]:
        raise RequestProblem(422, f"kinds: expected some of {', '.join(known)}, not {wrong[0]!r}")
    since, until = (_read_time(name, text, now) for name, text in (("since", order.since), ("until", order.until)))
    if since is not None and until is not None and since >= until:
        raise RequestProblem(422, "until must be later than since")
    target, topic = _read_target(order.to)
    criteria = LetterCriteria(
        tuple(order.ids), tuple(order.kinds), tuple(order.sinks), since, until, tuple(order.keys), order.text
    )
    return RedriveOrder(criteria, target, topic, limit=order.limit, rate=order.rate, restart=order.restart)


def _read_time(name: str, text: str, now: float) -> float | None:
    at = parse_time(name, text, now)
    if text and text[-1] in "smhd":  # relative to now: each run would select other letters
        raise RequestProblem(
            422, f"{name}: a redrive needs an absolute time (2026-05-01T12:00), so that it can be continued"
        )
    return None if at is None else at / _MILLION


def _read_target(text: str) -> tuple[Target, str]:
    if text in (Target.SOURCE.value, Target.SINK.value):
        return Target(text), ""
    name = text.removeprefix("topic:")
    try:
        return Target.TOPIC, check_topic(name)
    except ValueError as error:
        raise RequestProblem(422, f"to: the name {error}; write source, sink, or the name of a topic") from error


def describe_criteria(criteria: LetterCriteria) -> dict[str, Any]:
    """Return the filters that are set, by name."""
    values: dict[str, Any] = {
        "ids": list(criteria.ids),
        "kinds": list(criteria.kinds),
        "sinks": list(criteria.sinks),
        "keys": list(criteria.keys),
        "text": criteria.text,
        "since": _format_time(criteria.since),
        "until": _format_time(criteria.until),
    }
    return {name: value for name, value in values.items() if value}


def _format_time(at: float | None) -> str:
    if at is None:
        return ""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return f"{at:g}"


def describe_redrive(state: RedriveState) -> RedriveReport:
    return RedriveReport(
        redrive_id=state.redrive_id,
        number=state.number,
        dry_run=state.order.dry_run,
        to=name_target(state.order),
        filters=describe_criteria(state.order.criteria),
        rate=state.order.rate,
        by=state.by,
        began_at=state.began_at,
        ended_at=state.ended_at,
        ended=state.ended,
        error=state.error,
        resumed=state.resumed,
        total=state.total,
        read=state.read,
        letters=state.letters,
        messages=state.messages,
        not_sent=[Count(what=why, letters=count) for why, count in state.not_sent.items()],
        failed=[UnsentLetterView(letter_id=letter_id, why=why) for letter_id, why in state.failed],
        lost=state.lost,
        destinations=[
            Count(what=redact_text(destination), letters=count) for destination, count in state.destinations.items()
        ],
    )


def describe_past(past: PastRedrive) -> Past:
    return Past(
        to=past.to,
        filters=describe_criteria(past.criteria),
        first_at=past.first_at,
        last_at=past.last_at,
        records=past.records,
        unsent=past.unsent,
    )
