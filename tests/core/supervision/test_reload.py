"""When saved code replaces the running one, and when it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.supervision.reload import (
    CodeLoaded,
    DrainEngines,
    Effect,
    EnginesEnded,
    EnginesReady,
    Finish,
    LoadCode,
    LoadFailed,
    Reload,
    Saved,
    StartEngines,
    StopRequested,
    Tell,
)


def act(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Tell)]


def told(effects: list[Effect]) -> list[Tell]:
    return [effect for effect in effects if isinstance(effect, Tell)]


def reloaded(machine: Reload, code: str) -> None:
    """Replace the running code by other code that loads."""
    assert act(machine.feed(Saved(code))) == [LoadCode(code)]
    assert act(machine.feed(CodeLoaded())) == [DrainEngines()]
    assert act(machine.feed(EnginesEnded())) == [StartEngines(code)]


def test_saved_code_is_loaded_then_the_engines_drain_then_others_start() -> None:
    machine = Reload("a")
    assert machine.feed(EnginesReady()) == []

    reloaded(machine, "b")

    assert machine.needed == {"a", "b"}  # a is what continues if b does not get ready
    assert [tell.error for tell in told(machine.feed(EnginesReady()))] == [None]
    assert machine.needed == {"b"}


def test_a_save_without_a_change_does_nothing() -> None:
    assert Reload("a").feed(Saved("a")) == []


def test_code_that_does_not_load_leaves_the_engines_alone_and_is_shown() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))

    (tell,) = machine.feed(LoadFailed("SyntaxError in line 3"))

    assert isinstance(tell, Tell)
    assert tell.error == "SyntaxError in line 3"
    assert "the running code stays in use" in tell.text


def test_code_that_did_not_load_is_tried_again_at_the_next_save_even_unchanged() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(LoadFailed("the database is away"))

    assert machine.feed(Saved("b")) == [LoadCode("b")]


def test_going_back_to_the_running_code_replaces_nothing() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(LoadFailed("no"))

    assert act(machine.feed(Saved("a"))) == []


def test_a_save_during_a_load_makes_that_load_obsolete() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    assert machine.feed(Saved("c")) == []

    assert machine.feed(CodeLoaded()) == [LoadCode("c")]
    assert act(machine.feed(CodeLoaded())) == [DrainEngines()]
    assert act(machine.feed(EnginesEnded())) == [StartEngines("c")]


def test_the_failure_of_an_obsolete_load_is_not_shown() -> None:
    machine = Reload("a")
    machine.feed(Saved("half a file"))
    machine.feed(Saved("b"))

    assert machine.feed(LoadFailed("SyntaxError")) == [LoadCode("b")]


def test_a_save_during_a_drain_changes_what_starts_after_it() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())
    assert machine.feed(Saved("c")) == [LoadCode("c")]
    assert act(machine.feed(CodeLoaded())) == []  # the engines drain already

    assert act(machine.feed(EnginesEnded())) == [StartEngines("c")]


def test_a_failed_load_during_a_drain_starts_the_code_that_did_load() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())
    machine.feed(Saved("c"))

    (tell,) = told(machine.feed(LoadFailed("no")))

    assert "the previously saved code stays in use" in tell.text
    assert act(machine.feed(EnginesEnded())) == [StartEngines("b")]


def test_going_back_during_a_drain_starts_the_old_code_again_without_loading_it() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())

    assert act(machine.feed(Saved("a"))) == []
    assert act(machine.feed(EnginesEnded())) == [StartEngines("a")]


def test_going_back_to_the_code_that_waits_for_the_drain_changes_nothing() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())
    machine.feed(Saved("c"))
    machine.feed(LoadFailed("no"))

    assert act(machine.feed(Saved("b"))) == []
    assert act(machine.feed(EnginesEnded())) == [StartEngines("b")]


def test_engines_that_end_before_they_are_ready_are_replaced_by_the_code_before() -> None:
    machine = Reload("a")
    reloaded(machine, "b")

    effects = machine.feed(EnginesEnded("on_ready raised"))

    assert [tell.error for tell in told(effects)] == ["on_ready raised"]
    assert act(effects) == [StartEngines("a")]
    assert act(machine.feed(EnginesReady())) == []
    assert act(machine.feed(EnginesEnded("on_ready raised"))) == [Finish()]


def test_the_last_good_code_stays_the_same_while_bad_ones_are_saved() -> None:
    machine = Reload("a")
    reloaded(machine, "b")
    reloaded(machine, "c")

    assert act(machine.feed(EnginesEnded("no"))) == [StartEngines("a")]


def test_engines_that_get_ready_while_they_drain_for_other_code_prove_nothing() -> None:
    machine = Reload("a")
    reloaded(machine, "b")
    machine.feed(Saved("c"))
    machine.feed(CodeLoaded())

    assert machine.feed(EnginesReady()) == []
    machine.feed(EnginesEnded())
    assert act(machine.feed(EnginesEnded("no"))) == [StartEngines("a")]


def test_the_end_of_engines_that_were_ready_ends_the_run() -> None:
    machine = Reload("a")
    reloaded(machine, "b")
    machine.feed(EnginesReady())

    assert machine.feed(EnginesEnded("the configuration is wrong")) == [Finish()]


def test_a_final_end_ends_the_run_whatever_waits() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())

    assert machine.feed(EnginesEnded("another process uses the name", final=True)) == [Finish()]


def test_after_a_stop_nothing_is_loaded_and_nothing_starts() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    assert machine.feed(StopRequested()) == []

    assert machine.feed(CodeLoaded()) == []
    assert machine.feed(Saved("c")) == []
    assert machine.feed(EnginesEnded()) == [Finish()]


def test_a_load_that_fails_after_a_stop_is_not_shown() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(StopRequested())

    assert machine.feed(LoadFailed("no")) == []


def test_a_stop_during_a_reload_ends_the_run_once_the_engines_have_ended() -> None:
    machine = Reload("a")
    machine.feed(Saved("b"))
    machine.feed(CodeLoaded())
    machine.feed(StopRequested())

    assert machine.feed(EnginesEnded()) == [Finish()]


@given(st.lists(st.sampled_from(["save a", "save b", "save c", "loaded", "failed", "ready", "ended", "stop"])))
def test_in_any_order_of_events_engines_start_only_when_others_have_ended(words: list[str]) -> None:
    machine = Reload("a")
    running, draining, stopping, loading, loaded = True, False, False, None, {"a"}
    for word in words:
        if word in ("loaded", "failed") and loading is None:
            continue
        if word in ("ready", "ended") and not running:
            continue
        match word:
            case "loaded":
                loaded.add(loading)
                loading, event = None, CodeLoaded()
            case "failed":
                loading, event = None, LoadFailed("no")
            case "ready":
                event = EnginesReady()
            case "ended":
                running = draining = False
                event = EnginesEnded("no")
            case "stop":
                stopping, event = True, StopRequested()
            case _:
                event = Saved(word.removeprefix("save "))
        for effect in machine.feed(event):
            match effect:
                case LoadCode(code):
                    assert loading is None
                    assert not stopping
                    loading = code
                case DrainEngines():
                    assert running
                    assert not draining
                    draining = True
                case StartEngines(code):
                    assert not running
                    assert not stopping
                    assert code in loaded
                    running = True
        assert loading is None or loading in machine.needed
        loaded &= machine.needed  # the shell forgets all others
        if not running:
            return  # the run is over
