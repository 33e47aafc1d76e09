from __future__ import annotations

import pytest

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.endings import Failure, Success
from tidemill.services.worker.reports import Reports
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport

REFUSAL = RemoteError("too large", retryable=False)


def tell_all(reports: Reports, bad: set[int]) -> dict[int, AttemptReport | CallbackReport]:
    """Tell everything to a store that cannot store what is bad, but can store its failure."""
    stored: dict[int, AttemptReport | CallbackReport] = {}
    for _ in range(1000):
        if not len(reports):
            return stored
        given, callbacks = reports.take()
        taken = {one.task: one for one in given} | {one.id: one for one in callbacks}
        said = {number for number, one in taken.items() if "cannot be stored" in str(one)}
        if bad & set(taken) - said:
            reports.note_refused(REFUSAL)
        else:
            reports.note_stored()
            stored |= taken
    raise AssertionError("it never ends")


@pytest.mark.parametrize("bad", [set(), {0}, {3, 4}, {99}, set(range(100))])
def test_what_cannot_be_stored_fails_alone_and_the_others_are_told(bad: set[int]) -> None:
    reports = Reports(str)
    for number in range(100):
        reports.add(
            CallbackReport(number, None) if number % 5 == 4 else AttemptReport(number, 3, Success(), (("k", "1"),))
        )

    stored = tell_all(reports, bad)

    assert sorted(stored) == list(range(100))
    text = "the result cannot be stored: RemoteError: too large"
    for number, one in stored.items():
        if isinstance(one, CallbackReport):
            assert one == CallbackReport(number, text if number in bad else None)
        else:
            assert one == (
                AttemptReport(number, 3, Failure(text))
                if number in bad
                else AttemptReport(number, 3, Success(), (("k", "1"),))
            )


@pytest.mark.parametrize("report", [AttemptReport(1, 3, Success()), CallbackReport(1, None), None])
def test_a_store_that_stores_nothing_at_all_is_an_error(report: AttemptReport | CallbackReport | None) -> None:
    reports = Reports(str)
    if report is not None:
        reports.add(report)
        reports.take()
        reports.note_refused(REFUSAL)
    reports.take()
    with pytest.raises(RemoteError):
        reports.note_refused(REFUSAL)
