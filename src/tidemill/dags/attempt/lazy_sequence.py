"""The values of a map's elements or of a generator, read from the store a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

from tidemill.core.tasks.instance import format_instance
from tidemill.dags.attempt.task_services import PageQuery, StoredValues, TaskServices
from tidemill.runtime.json.codec import decode

#: The number of values to ask for; the store may send fewer.
PAGE_VALUES: Final = 1_000


class LazySequence(Sequence[Any]):
    """What the elements of a map returned, or a generator task yielded, in the order of their indices.

    The sequence is dense: elements that stored nothing have no place in it, so `values[i]` is the i-th stored value,
    and not that of the element with index i. `items()` gives both. Values are read in pages of 1,000, of which one is
    kept, so that iterating takes the same memory whatever the length.

    Args:
        services: The access to the store.
        task_id: The task; empty: the values are a long list in the configuration of the run.
        key: The key that the values are stored under, or the name of the list.
        dag_id: The DAG; None: that of the running task.
        run_id: The run; None: that of the running task.
        map_index: The element in which a generator of a mapped group yielded the values; None: it is another task.
    """

    def __init__(
        self,
        services: TaskServices,
        task_id: str,
        key: str,
        dag_id: str | None = None,
        run_id: str | None = None,
        map_index: int | None = None,
    ) -> None:
        self._services = services
        self._task_id, self._key, self._map_index = task_id, key, map_index
        self._dag_id, self._run_id = dag_id, run_id
        self._total: int | None = None
        #: The page that was read last, and the place of its first value.
        self._start = 0
        self._page: Sequence[tuple[int, str]] = ()

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of each element with its value."""
        after = -1
        while page := self._read(after=after):
            for index, text in page:
                yield index, decode(text)
            after = page[-1][0]

    def read_range(self, first: int, end: int) -> Iterator[Any]:
        """Yield the values from one place of the sequence up to another."""
        while first < end:
            page = self._read(offset=first, limit=min(PAGE_VALUES, end - first))
            for _, text in page:
                yield decode(text)
            if not page:
                return
            first += len(page)

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self.items())

    def __len__(self) -> int:
        if self._total is None:
            first = self._ask(counts=True)
            self._total = first.total or 0
            self._start, self._page = 0, first.values
        return self._total

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a value by its place, or a part of the sequence, which is read as lazily."""
        if isinstance(index, slice):
            return _LazyPart(self, range(len(self))[index])
        place = range(len(self))[index]
        # A page starts at a round place, so that reading backwards uses it too; a page of large values may end before
        # `place`.
        for start in (place - place % PAGE_VALUES, place):
            if self._start <= place < self._start + len(self._page):
                break
            self._start, self._page = start, self._read(offset=start)
        if not self._page:
            raise IndexError(f"value {place} of task {self._task_id!r} has been deleted")
        return decode(self._page[place - self._start][1])

    def __eq__(self, other: object) -> bool:
        return _is_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        name = self._task_id if self._map_index is None else format_instance(self._task_id, self._map_index)
        what = f"task {name!r}" if name else f"conf[{self._key!r}]"
        return f"<LazySequence of {what} with {len(self)} values>"

    def _read(self, *, after: int = -1, offset: int = 0, limit: int = PAGE_VALUES) -> tuple[tuple[int, str], ...]:
        return self._ask(after=after, offset=offset, limit=limit).values

    def _ask(self, **what: Any) -> StoredValues:
        if self._map_index is not None:
            what["map_index"] = self._map_index
        query = PageQuery(self._task_id, self._key, dag_id=self._dag_id, run_id=self._run_id, **what)
        return self._services.get_page(query)


class _LazyPart(Sequence[Any]):
    """A slice of a lazy sequence.

    Args:
        whole: The sequence.
        places: The places of the values in it.
    """

    def __init__(self, whole: LazySequence, places: range) -> None:
        self._whole = whole
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return _LazyPart(self._whole, self._places[index])
        return self._whole[self._places[index]]

    def __iter__(self) -> Iterator[Any]:
        if self._places.step == 1:
            return self._whole.read_range(self._places.start, self._places.stop)
        return (self._whole[place] for place in self._places)

    def __eq__(self, other: object) -> bool:
        return _is_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} values of {self._whole!r}>"


def is_lazy(value: object) -> bool:
    """Return whether a value is a lazy sequence or a part of one."""
    return isinstance(value, LazySequence | _LazyPart)


def _is_equal(one: Sequence[Any], other: object) -> bool:
    if not isinstance(other, Sequence) or isinstance(other, str | bytes):
        return False
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))
