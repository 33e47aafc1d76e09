"""What executors do is asked of engines only while somebody follows it, and computed once for all who do."""

from __future__ import annotations

import json

from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import log_in

from tidemill.runtime.link.live_tasks import LiveState, LiveTask, LiveWindow
from tidemill.web.pages import Pages
from tidemill.web.pipeline import live_board
from tidemill.web.pipeline.live_board import LiveBoard
from tidemill.web.pipeline.section import PipelineView
from tidemill.web.pipeline.start import describe_about, open_archive


def task(number: int, at: float, seconds: float = 0.0, outcome: str = "", of: int = 1) -> LiveTask:
    return LiveTask(0, f"task-{number}", SCRIPT, 1, "orders", 0, number, at, seconds, outcome, of)


def state(*ended: LiveTask, left_out: int = 0, at: float = 1000.0) -> LiveState:
    window = LiveWindow("orders", 0, 7, 100, 50, 12, at - 9)
    waiting, due = [task(50, at)], [task(60, at + 7)]
    return LiveState(8, [task(1, at - 3)], list(ended), left_out, 5, waiting, 2, due, [window])


def test_news_are_told_once_and_everything_of_the_last_minute_again() -> None:
    now = [1000.0]
    board = LiveBoard(lambda: now[0])
    assert board.describe_news().engines == []
    board.take(0, "a", state(task(2, 990.0, 1.0, "ok", 12), left_out=3))
    board.take(1, "b", state(task(3, 991.0, 1.0, "exit")))
    news = board.describe_news()
    assert (news.number, [(one.task_id, one.of, one.engine) for one in news.ended]) == (
        2,
        [("task-2", 12, 0), ("task-3", 1, 1)],
    )
    assert [(one.slot, one.executors, one.running, one.queued, one.retrying) for one in news.engines] == [
        (0, 8, 1, 5, 2),
        (1, 8, 1, 5, 2),
    ]
    assert (news.left_out, len(news.running), len(news.windows)) == (3, 2, 2)
    assert board.describe_news().ended == []
    everything = board.describe_all()
    assert (everything.number, [one.task_id for one in everything.ended]) == (3, ["task-2", "task-3"])
    now[0] += 4.0
    board.take(1, "b", state())
    now[0] += 4.0
    assert [one.slot for one in board.describe_all().engines] == [1], "the other one is silent"
    now[0] += 60.0
    assert board.describe_all().ended == []


def test_what_a_board_keeps_is_limited() -> None:
    board = LiveBoard(lambda: 1000.0)
    for number in range(50):
        board.take(0, "a", state(*(task(number, 999.0, 1.0, "ok") for _ in range(200))))
    assert len(board.describe_all().ended) == live_board.MOST_ENDED
    assert len(board.describe_all().waiting) <= live_board.MOST_LISTED


async def test_engines_are_asked_only_while_somebody_follows() -> None:
    pipeline = ScriptedPipeline()
    watched = pipeline.watched()
    view = PipelineView(watched, Pages(describe_about(watched)), open_archive(watched))
    pipeline.live = {0: state(task(2, 990.0, 1.0, "ok"))}
    view.tick()
    other = await view.live.listen("overview")
    await anext(other)
    view.tick()
    assert pipeline.watches == 0
    clients = [await view.live.listen("tasks") for _ in range(3)]
    for client in clients:
        assert (await anext(client))["event"] == "tasks"
    view.tick()
    assert pipeline.watches == 1
    told = [json.loads((await anext(client))["data"]) for client in clients]
    assert [one["number"] for one in told] == [told[0]["number"]] * 3, "computed once"
    assert [one["task_id"] for one in told[0]["ended"]] == ["task-2"]
    view.tick()
    view.tick()
    slow = clients[0]
    assert await anext(slow) == {"event": "missed", "data": json.dumps({"updates": 1})}
    assert json.loads((await anext(slow))["data"])["number"] == told[0]["number"] + 2, "a number is missing"
    for client in clients:
        await client.aclose()
    before = pipeline.watches
    view.tick()
    assert pipeline.watches == before


async def test_the_page_and_the_api_show_what_executors_do() -> None:
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "ws_min_duration_ms": 250}})
    async with log_in(pipeline) as client:
        page = await client.get("/live")
        told = (await client.get("/api/v1/live/tasks")).json()
    assert page.status_code == 200
    assert "less than 250 ms are sampled" in page.text
    assert (told["engines"], told["running"]) == ([], [])
