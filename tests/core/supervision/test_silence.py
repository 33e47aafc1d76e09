"""Engines of bounded runs that hang: reported once, not blamed for the driver's pauses, and given up in the end."""

from __future__ import annotations

import random

from tests.core.examples import examples

from tidemill.core.supervision.silence import Hung, SilenceWatch


def test_a_silent_engine_is_reported_once():
    watch = SilenceWatch(15.0)
    watch.note_joined(1, 7, 0.0)
    watch.note_joined(2, 8, 0.0)
    found = []
    for second in range(40):
        watch.note_heartbeat(2, float(second))
        found += [(second, each) for each in watch.tick(float(second))]
    assert found == [(15, Hung(1, 7, 1, give_up=False))]
    watch.note_heartbeat(1, 40.0)  # it goes on after all
    assert watch.tick(41.0) == []


def test_an_engine_that_left_is_not_reported():
    watch = SilenceWatch(15.0)
    watch.note_joined(1, 7, 0.0)
    watch.note_left(1)
    watch.note_left(1)
    assert [watch.tick(float(second)) for second in range(20)] == [[]] * 20


def test_no_engine_is_blamed_after_a_pause_of_the_driver():
    watch = SilenceWatch(15.0)
    watch.note_joined(1, 7, 0.0)
    assert watch.tick(1.0) == []
    assert watch.tick(100.0) == []
    assert [second for second in range(101, 130) if watch.tick(float(second))] == [115]


def test_a_part_that_hangs_repeatedly_is_given_up():
    watch = SilenceWatch(15.0, max_hangs=3)
    now, reported = 0.0, []
    for link in range(3):
        watch.note_joined(link, 7, now)
        while not (found := watch.tick(now)):
            now += 1.0
        reported += found
    assert [(each.times, each.give_up) for each in reported] == [(1, False), (2, False), (3, True)]


def test_random_runs_blame_exactly_the_engines_that_were_silent_while_the_driver_ran():
    for seed in range(examples(300)):
        chance = random.Random(seed)
        watch, now, last_tick = SilenceWatch(15.0), 0.0, None
        heard: dict[int, float] = {}
        for step in range(400):
            now += chance.choice((0.2, 0.5, 1.0, 1.9, 5.0 if chance.random() < 0.1 else 1.0))
            what = chance.random()
            if what < 0.1:
                watch.note_joined(step, step % 5, now)
                heard[step] = now
            elif what < 0.3 and heard:
                link = chance.choice(list(heard))
                watch.note_heartbeat(link, now)
                heard[link] = now
            elif what < 0.35 and heard:
                link = chance.choice(list(heard))
                watch.note_left(link)
                del heard[link]
            else:
                late = last_tick is not None and now - last_tick > 2.0
                last_tick = now
                if late:
                    heard = dict.fromkeys(heard, now)
                expected = {link for link, at in heard.items() if now - at >= 15.0}
                assert {each.link for each in watch.tick(now)} == expected
                heard = {link: at for link, at in heard.items() if link not in expected}
