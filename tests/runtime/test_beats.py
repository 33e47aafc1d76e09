"""Beats: the driver holds what the engine has, whatever changed in between."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tidemill.runtime.link.beats import Beat, PartitionChanges, apply_beat, whole_beat
from tidemill.runtime.link.progress import EngineProgress, SinkStats


def sent(beat: Beat) -> Beat:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=Beat)


def test_a_whole_beat_tells_a_whole_snapshot() -> None:
    progress = EngineProgress(
        consumed=7,
        committed={"t/0": 3},
        flow={"t/0": (5, 4, 1)},
        lag={"t/0": 1, "t/1": 2},
        paused=["t/1"],
        partitions=["t/0", "t/1"],
        waits={"kafka": "away"},
        sinks={"sinks.kafka.out": SinkStats(refused=1)},
    )
    before = EngineProgress(committed={"t/9": 1}, lag={"t/9": 1}, partitions=["t/9"], paused=["t/9"])
    assert apply_beat(sent(whole_beat(progress)), before) == progress


def test_what_did_not_change_is_the_same_object_and_what_did_leaves_the_former_snapshot_alone() -> None:
    first = EngineProgress(committed={"t/0": 3, "t/1": 4}, lag={"t/0": 1, "t/1": 2}, partitions=["t/0", "t/1"])
    second = apply_beat(Beat(EngineProgress(consumed=1), PartitionChanges(committed={"t/0": 5})), first)
    assert second.committed == {"t/0": 5, "t/1": 4}
    assert first.committed == {"t/0": 3, "t/1": 4}
    assert second.lag is first.lag
    assert second.partitions is first.partitions
    third = apply_beat(Beat(EngineProgress(), PartitionChanges(lag={"t/0": 9}, lag_unknown=["t/1"])), second)
    assert third.lag == {"t/0": 9}
    assert second.lag == {"t/0": 1, "t/1": 2}
    assert third.committed is second.committed


names = st.sampled_from([f"t/{n}" for n in range(4)])
offsets = st.dictionaries(names, st.integers(0, 3))
states = st.builds(
    EngineProgress,
    consumed=st.integers(0, 9),
    committed=offsets,
    flow=st.dictionaries(names, st.tuples(*[st.integers(0, 3)] * 3)),
    lag=offsets,
    paused=st.lists(names, unique=True),
    partitions=st.lists(names, unique=True),
)


def changes_between(before: EngineProgress, now: EngineProgress) -> PartitionChanges:
    """Tell what changed; committed offsets are only added or moved, as an engine's are."""
    return PartitionChanges(
        committed=now.committed,
        flow=now.flow,
        lag=now.lag,
        lag_unknown=[name for name in before.lag if name not in now.lag],
        paused=now.paused if now.paused != before.paused else None,
        partitions=now.partitions if now.partitions != before.partitions else None,
    )


@given(st.lists(st.tuples(states, st.booleans()), max_size=8))
def test_a_snapshot_follows_any_sequence_of_beats(steps: list[tuple[EngineProgress, bool]]) -> None:
    seen = engine = EngineProgress()
    for state, whole in [(EngineProgress(), True), *steps]:
        if not whole:
            state.committed = engine.committed | state.committed
            state.flow = engine.flow | state.flow
        counts = EngineProgress(consumed=state.consumed)
        beat = whole_beat(state) if whole else Beat(counts, changes_between(engine, state))
        seen, engine = apply_beat(sent(beat), seen), state
        assert seen == engine
