"""Whose tasks a trigger may cancel."""

from __future__ import annotations

import pytest

from tidemill.core.triggers.task_guard import CallingCode, Cancelling, judge_cancelling

MINE, OTHER = object(), object()


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("code", CallingCode)
def test_a_trigger_may_cancel_its_own_tasks(code: CallingCode, guarded: bool):
    assert judge_cancelling(MINE, MINE, code, guarded=guarded) is Cancelling.ALLOWED


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("caller", [MINE, None])
@pytest.mark.parametrize("owner", [MINE, OTHER, None])
def test_the_host_may_cancel_every_task_in_whichever_context_it_runs(owner, caller, guarded):
    assert judge_cancelling(owner, caller, CallingCode.HOST, guarded=guarded) is Cancelling.ALLOWED


@pytest.mark.parametrize("code", [CallingCode.ASYNCIO, CallingCode.OTHER])
@pytest.mark.parametrize("owner", [OTHER, None])
def test_a_trigger_cannot_cancel_what_runs_another_one_or_the_host(owner, code):
    assert judge_cancelling(owner, MINE, code, guarded=True) is Cancelling.REFUSED


@pytest.mark.parametrize("caller", [OTHER, None])
def test_a_trigger_whose_helper_task_others_cancel_is_disturbed(caller):
    assert judge_cancelling(MINE, caller, CallingCode.OTHER, guarded=False) is Cancelling.DISTURBS


@pytest.mark.parametrize("code", CallingCode)
def test_code_outside_of_any_trigger_may_cancel_what_belongs_to_none(code: CallingCode):
    """Timeouts of libraries, too: they cancel the task that they run in."""
    assert judge_cancelling(None, None, code, guarded=False) is Cancelling.ALLOWED
    assert judge_cancelling(MINE, None, CallingCode.ASYNCIO, guarded=True) is Cancelling.REFUSED


def test_groups_and_timeouts_of_the_host_end_what_they_have_created_in_the_context_of_a_trigger():
    assert judge_cancelling(None, MINE, CallingCode.ASYNCIO, guarded=False, creator=MINE) is Cancelling.ALLOWED
    assert judge_cancelling(None, MINE, CallingCode.OTHER, guarded=False, creator=MINE) is Cancelling.REFUSED
    assert judge_cancelling(None, MINE, CallingCode.ASYNCIO, guarded=False, creator=OTHER) is Cancelling.REFUSED
