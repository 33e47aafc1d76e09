"""What an entry looks like to a person."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tidemill.runtime.log.console import ConsoleFormat
from tidemill.runtime.log.tracebacks import CodePaths, rearrange

MOMENT = datetime(2026, 5, 1, 10, 20, 30, tzinfo=UTC)
CONTEXT = {"version": "1", "worker_id": "w", "consumer_group": "g", "engine": 3}
PLACES = CodePaths("/app", ("/lib/python3",), "/home/me")


def entry(**fields: Any) -> dict[str, Any]:
    return {"timestamp": MOMENT.isoformat(), "level": "info", "event": "assigned", **fields}


def render(*, colors: bool = False, **fields: Any) -> str:
    return ConsoleFormat(CONTEXT, colors=colors, code_paths=PLACES).render(entry(**fields))


def test_an_entry_is_time_level_event_and_values() -> None:
    local = MOMENT.astimezone().strftime("%H:%M:%S")

    assert render(partitions=8, seconds=0.25, paused=False, last=None) == (
        f"{local} info    assigned partitions=8 seconds=0.25 paused=false last=null"
    )


def test_what_every_entry_of_the_process_carries_is_left_out_unless_it_differs() -> None:
    text = render(version="1", worker_id="other", consumer_group="g", engine=3, logger="tidemill.sources.kafka")

    assert text.endswith("assigned worker_id=other engine=3")
    assert render(logger="urllib3.pool").endswith("assigned logger=urllib3.pool")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/0", "plain/0"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        (["t/0", "t/1"], '["t/0", "t/1"]'),
        ("bell\x07", "bell\\x07"),
        ("caf\udce9", "caf\\udce9"),
        (ValueError("bad"), "bad"),
    ],
)
def test_values_can_be_told_from_each_other_and_cannot_steer_the_terminal(value: object, shown: str) -> None:
    assert render(value=value).endswith(f"assigned value={shown}")
    assert "\x1b" not in render(event="red \x1b[31m", value={"x": "\x1b[2J"}, exception="E: \x1b[2J")


def test_a_value_of_several_lines_follows_the_entry() -> None:
    lines = render(error="first\nsecond", n=1).splitlines()

    assert lines[0].endswith("assigned n=1")
    assert lines[1:] == ["  error:", "    first", "    second"]


def test_colors_are_there_if_they_are_wanted() -> None:
    plain, colored = render(level="error", n=1), render(colors=True, level="error", n=1)

    assert "\x1b" not in plain
    assert "\x1b[31merror" in colored
    assert "\x1b[1massigned\x1b[0m" in colored


TRACEBACK = """Traceback (most recent call last):
  File "/lib/python3/asyncio/runners.py", line 118, in run
    return self._loop.run_until_complete(task)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/handler.py", line 3, in arrange
    return half(0)
  File "/home/me/lib/maths.py", line 9, in half
    return 1 / n
           ~~^~~
  File "/app/tidemill/pipeline/hooks.py", line 8, in call
    hook()
ZeroDivisionError: division by zero
and more about it"""


def test_an_exception_shows_its_error_first_and_then_the_users_frames() -> None:
    assert rearrange(TRACEBACK, PLACES).splitlines() == [
        "ZeroDivisionError: division by zero",
        "and more about it",
        "  lib/maths.py:9 in half: return 1 / n",
        "  handler.py:3 in arrange: return half(0)",
        "  called from, innermost first:",
        "  tidemill/pipeline/hooks.py:8 in call: hook()",
        "  asyncio/runners.py:118 in run: return self._loop.run_until_complete(task)",
    ]
    assert render(exception=TRACEBACK).splitlines()[1:3] == [
        "  ZeroDivisionError: division by zero",
        "  and more about it",
    ]


def test_an_error_that_the_exception_shows_anyway_is_not_repeated() -> None:
    for error in ("HandlerError: on_ready raised ZeroDivisionError: division by zero", "division by zero"):
        assert render(error=error, exception=TRACEBACK).splitlines()[0].endswith(" assigned")
    assert "error=other" in render(error="other", exception=TRACEBACK)
    assert 'error="division by zero"' in render(error="division by zero")


def test_the_last_exception_of_a_chain_comes_first_and_says_what_caused_it() -> None:
    for link, said in (
        ("The above exception was the direct cause of the following exception:", "caused by Zero"),
        (
            "During handling of the above exception, another exception occurred:",
            "raised while handling Zero",
        ),
    ):
        last = 'Traceback (most recent call last):\n  File "/home/me/x.py", line 1, in f\n    g()\nValueError: no'
        lines = rearrange(f"{TRACEBACK}\n\n{link}\n\n{last}", PLACES).splitlines()
        assert lines[:2] == ["ValueError: no", "  x.py:1 in f: g()"]
        assert lines[2].startswith(said)


def test_a_real_error_of_this_file_counts_as_the_users() -> None:
    import traceback

    try:
        int("seven")
    except ValueError as error:
        text = "".join(traceback.format_exception(error))

    lines = rearrange(text, CodePaths()).splitlines()

    assert lines[0].startswith("ValueError: invalid literal")
    assert "test_log_console.py" in lines[1]
    assert 'int("seven")' in lines[1]


def test_what_is_not_an_ordinary_traceback_is_shown_as_it_is() -> None:
    group = "  + Exception Group Traceback (most recent call last):\n  | E: x"
    broken = "Traceback (most recent call last):\n"

    assert rearrange(group, PLACES) == group
    assert rearrange("just text", PLACES) == "just text"
    assert rearrange(broken, PLACES) == broken
