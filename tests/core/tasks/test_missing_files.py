"""Which files no worker of a queue has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.missing_files import LackedFile, UnservedFile, describe_missing_file, find_unserved

QUEUES = st.sampled_from(["a", "b", "c"])
WORKERS = st.dictionaries(st.integers(1, 5), st.lists(QUEUES, unique=True).map(tuple), max_size=5)
LACKED = st.lists(
    st.builds(LackedFile, st.integers(1, 6), st.sampled_from(["x.py", "y.py"]), st.integers(0, 9)),
    unique_by=lambda one: (one.session, one.path),
)


@given(WORKERS, LACKED)
def test_a_file_is_unserved_exactly_if_each_worker_of_a_queue_lacks_it_since_the_last_one_does(
    workers: dict[int, tuple[str, ...]], lacked: list[LackedFile]
) -> None:
    since = {(one.session, one.path): one.since_us for one in lacked}
    expected = set()
    for queue in "abc":
        serving = [session for session, queues in workers.items() if queue in queues]
        for path in ("x.py", "y.py"):
            if serving and all((session, path) in since for session in serving):
                expected.add(UnservedFile(queue, path, max(since[session, path] for session in serving)))
    found = find_unserved(workers, lacked)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_the_error_names_the_queue_the_file_and_the_setting() -> None:
    text = describe_missing_file("etl.py", "large", 60.0)
    assert text.startswith("MissingFileError: ")
    assert all(part in text for part in ("'large'", "etl.py", "60 s", "dags.missing_file_seconds"))
