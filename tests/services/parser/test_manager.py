from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.size import sized
from tests.until import until

from tidemill.core.errors import InvariantError, RemoteError
from tidemill.dags.structure.structures import read_structure
from tidemill.services.parser.files import find_files
from tidemill.services.parser.manager import ParserManager
from tidemill.services.parser.reading import PRELOAD
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import ListFiles, RemoveFile, StoredDag, StoreFile

DAG = """
from tidemill.dags import DAG, EmptyOperator
with DAG({name!r}):
    EmptyOperator(task_id={task!r})
"""


class Store:
    """Keeps what is stored, by file."""

    def __init__(self) -> None:
        self.files: dict[str, StoreFile] = {}
        self.calls = 0
        self.failures = 0

    async def call(self, request: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise RemoteError("the store is away")
        match request:
            case StoreFile():
                self.calls += 1
                self.files[request.path] = request
                return tuple(StoredDag(read_structure(text).id, True) for text in request.structures)
            case RemoveFile():
                return self.files.pop(request.path, None) is not None
            case ListFiles():
                return tuple(self.files.values())

    def task_of(self, path: str) -> str | None:
        """Return the only task of the only DAG of a file."""
        file = self.files.get(path)
        return read_structure(file.structures[0]).tasks[0].id if file and file.structures else None


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(textwrap.dedent(text))
    new.replace(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "dags"
    found.mkdir()
    return found


@asynccontextmanager
async def running(
    folder: Path, store: Store, timeout_seconds: float = 30.0, reparse_seconds: float = 3600.0
) -> AsyncIterator[ParserManager]:
    zygote = ZygoteClient(Setup(preload=PRELOAD))
    await zygote.start()
    manager = ParserManager(store, zygote, folder, timeout_seconds, reparse_seconds=reparse_seconds)
    task = asyncio.create_task(manager.run())
    try:
        await asyncio.wait_for(manager.ready.wait(), 60)
        yield manager
    finally:
        task.cancel()
        await asyncio.wait([task])
        await zygote.close()
        if not task.cancelled() and task.exception():
            raise task.exception()  # type: ignore[misc]


@pytest.fixture
def store() -> Store:
    return Store()


async def test_a_save_that_the_time_of_the_file_does_not_show_is_noticed(folder: Path, store: Store) -> None:
    path = folder / "a.py"
    path.write_text(DAG.format(name="a", task="one"))
    async with running(folder, store):
        await until(lambda: store.task_of("a.py") == "one")
        before = path.stat()
        with path.open("r+") as stream:  # the same size, and within the same tick of the clock
            stream.write(DAG.format(name="a", task="two"))
            stream.flush()
            os.utime(stream.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
        await until(lambda: store.task_of("a.py") == "two")


async def test_files_are_read_stored_changed_and_removed(folder: Path, store: Store) -> None:
    write(folder, "a.py", DAG.format(name="a", task="one"))
    write(folder, "below/b.py", DAG.format(name="b", task="two"))
    write(folder, ".hidden/c.py", DAG.format(name="c", task="three"))
    write(folder, "helpers.py", "X = 1")
    async with running(folder, store) as manager:
        assert sorted(store.files) == ["a.py", "below/b.py"]
        assert not manager.broken
        write(folder, "a.py", DAG.format(name="a", task="changed"))
        await until(lambda: store.task_of("a.py") == "changed")
        write(folder, "new.py", DAG.format(name="new", task="new"))
        await until(lambda: store.task_of("new.py") == "new")
        (folder / "a.py").unlink()
        await until(lambda: "a.py" not in store.files)
        assert store.calls == 4  # nothing was read that had not changed
    assert not list(folder.rglob("__pycache__"))


async def test_a_file_is_read_again_when_a_module_that_it_imports_changes(folder: Path, store: Store) -> None:
    write(folder, "names.py", "TASK = 'one'")
    write(folder, "a.py", "from names import TASK" + DAG.format(name="a", task="x").replace("'x'", "TASK"))
    write(folder, "b.py", DAG.format(name="b", task="b"))
    async with running(folder, store):
        assert store.task_of("a.py") == "one"
        assert sorted(store.files["a.py"].modules) == ["a.py", "names.py"]
        write(folder, "names.py", "TASK = 'two'")
        await until(lambda: store.task_of("a.py") == "two")
        assert store.calls == 3


async def test_an_error_is_kept_with_its_traceback_until_the_file_is_right(folder: Path, store: Store) -> None:
    write(folder, "a.py", "import missing_module\n" + DAG.format(name="a", task="one"))
    write(folder, "b.py", DAG.format(name="b", task="two"))
    async with running(folder, store) as manager:
        error = store.files["a.py"].error or ""
        assert error.startswith("Traceback (most recent call last):\n")
        assert f'File "{folder}/a.py", line 1, in <module>' in error
        assert error.endswith("ModuleNotFoundError: No module named 'missing_module'")
        assert "tidemill/" not in error
        assert manager.broken == 1
        assert store.files["b.py"].error is None
        # Another file makes it right: it did not exist when this one was read.
        write(folder, "missing_module.py", "")
        await until(lambda: store.files["a.py"].error is None)
        assert store.task_of("a.py") == "one"
        assert manager.broken == 0


async def test_whatever_a_file_does_is_its_own_error(folder: Path, store: Store) -> None:
    errors = [
        (
            "import os  # dag\nos._exit(7)",
            "the process that read the file ended with status 7 before the end of the file",
        ),
        ("import sys\nsys.exit('no dag')", "RuntimeError: the file called sys.exit('no dag')"),
        ("import os, signal  # dag\nos.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("dag = 1 +", "SyntaxError: invalid syntax"),
        ("raise KeyboardInterrupt  # dag", "KeyboardInterrupt"),
        ("def f(): f()\nf()  # dag", "RecursionError"),
        (DAG.format(name="a", task="b") + "    EmptyOperator(task_id='b')", "already has a task 'b'"),
        (
            DAG.format(name="a", task="b") + "    EmptyOperator(task_id='c') >> EmptyOperator(task_id='d') >> "
            "EmptyOperator(task_id='e', doc_md='x' * (4 << 20))",
            "at most 4,194,304 are allowed",
        ),
        (DAG.format(name="a", task="b") + DAG.format(name="a", task="b"), "the file has two DAGs 'a'"),
        ("raise ValueError('dag \\ud800 \\0 ' + 'x' * 10_000_000)", "ValueError: dag \\ud800 \\x00 xxx"),
        (
            "import os, time  # dag\nprint('before it hangs', flush=True)\nwhile True: time.sleep(1)",
            "took longer than 1.5 s",
        ),
    ]
    write(folder, "bad.py", errors[0][0])
    write(folder, "good.py", DAG.format(name="good", task="one"))
    async with running(folder, store, timeout_seconds=1.5):
        for number, (text, error) in enumerate(errors):
            write(folder, "bad.py", text)
            found = await until(lambda: store.files["bad.py"].error, what=text)
            assert error in found
            assert store.task_of("good.py") == "one"
            if "hangs" in text:
                assert "before it hangs" in found
                assert 'bad.py", line 3 in <module>' in found
            # The next version of the file is not affected.
            write(folder, "bad.py", DAG.format(name="bad", task=f"right{number}"))
            await until(lambda right=f"right{number}": store.task_of("bad.py") == right, what=text)


async def test_what_a_file_does_to_its_process_does_not_matter(folder: Path, store: Store) -> None:
    texts = [
        "import os\nif not os.fork():\n    os.setsid()\n    import time; time.sleep(3600)",
        "import os\nos.fork()",
        "import sys\nsys.path.clear(); sys.modules.pop('json', None)",
        "import os\nos.chdir('/'); os.environ.clear(); print('x' * 1_000_000)",
        "import os\nos.close(1); os.close(2)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()",
        "import atexit, time\natexit.register(time.sleep, 3600)",
    ]
    here = os.getcwd()
    async with running(folder, store):
        for number, text in enumerate(texts, 1):
            write(folder, "odd.py", text + DAG.format(name="odd", task=f"task{number}"))
            await until(lambda task=f"task{number}": store.task_of("odd.py") == task, what=text)
            assert store.files["odd.py"].error is None, text
            assert store.calls == number, text
    assert os.getcwd() == here


@pytest.mark.timeout(300)
async def test_a_file_that_hangs_holds_up_no_other(folder: Path, store: Store) -> None:
    count = sized(20, 200)
    write(folder, "hangs.py", "import time  # dag\ntime.sleep(3600)")
    for number in range(count):
        write(folder, f"f{number}.py", DAG.format(name=f"d{number}", task="one"))
    zygote = ZygoteClient(Setup(preload=PRELOAD))
    await zygote.start()
    manager = ParserManager(store, zygote, folder, 3600.0)
    task = asyncio.create_task(manager.run())
    await until(lambda: len(store.files) == count, 200)
    assert not manager.ready.is_set()
    write(folder, "f7.py", DAG.format(name="d7", task="two"))
    await until(lambda: store.task_of("f7.py") == "two")
    task.cancel()
    await asyncio.wait([task])
    await zygote.close()


async def test_a_store_that_is_away_is_asked_again(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.services.parser.manager.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("tidemill.services.parser.manager.SCAN_SECONDS", 0.05)
    store.failures = 3
    write(folder, "a.py", DAG.format(name="a", task="one"))
    async with running(folder, store):
        assert store.task_of("a.py") == "one"


async def test_files_of_a_folder_that_is_away_are_not_removed(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.services.parser.manager.SCAN_SECONDS", 0.05)
    write(folder, "a.py", DAG.format(name="a", task="one"))
    async with running(folder, store):
        away = folder.rename(folder.with_name("away"))
        await asyncio.sleep(0.3)  # nothing can be waited for: nothing is to happen
        assert "a.py" in store.files
        write(away, "b.py", DAG.format(name="b", task="two"))
        away.rename(folder)
        await until(lambda: store.task_of("b.py") == "two")


async def test_a_folder_that_goes_away_while_it_is_read_is_not_one_without_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "a.py", DAG.format(name="a", task="one"))
    write(folder, "b.py", DAG.format(name="b", task="one"))
    away = folder.with_name("away")

    def go_away(path: Path) -> bool:
        if not away.exists():
            folder.rename(away)
        return path.is_file()

    monkeypatch.setattr("tidemill.services.parser.files._may_define_dags", go_away)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_files(folder)


async def test_files_that_were_removed_while_nothing_ran_are_removed_at_the_start(folder: Path, store: Store) -> None:
    await store.call(StoreFile("gone.py", ""))
    write(folder, "a.py", DAG.format(name="a", task="one"))
    async with running(folder, store):
        assert sorted(store.files) == ["a.py"]


async def test_a_file_whose_name_is_not_text_is_left_out(folder: Path, store: Store) -> None:
    write(folder, "a.py", DAG.format(name="a", task="one"))
    (folder / os.fsdecode(b"caf\xe9.py")).write_text(DAG.format(name="b", task="two"))
    async with running(folder, store):
        assert sorted(store.files) == ["a.py"]


async def test_a_file_that_cannot_be_stored_for_an_unexpected_reason_keeps_no_other_one_away(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = store.call

    async def refuse(request: Any) -> Any:
        if isinstance(request, StoreFile) and request.path == "a.py":
            raise InvariantError("the call StoreFile failed")
        return await call(request)

    monkeypatch.setattr(store, "call", refuse)
    write(folder, "a.py", DAG.format(name="a", task="one"))
    write(folder, "b.py", DAG.format(name="b", task="two"))
    async with running(folder, store):
        assert sorted(store.files) == ["b.py"]
        write(folder, "c.py", DAG.format(name="c", task="three"))
        await until(lambda: "c.py" in store.files)
        monkeypatch.setattr(store, "call", call)
        write(folder, "a.py", DAG.format(name="a", task="again"))
        await until(lambda: store.task_of("a.py") == "again")


GENERATED = """
import json
from pathlib import Path
from tidemill.dags import DAG, EmptyOperator
for path in Path(__file__).parent.joinpath("conf").glob("*.json"):
    for name in json.loads(path.read_text()):
        with DAG(name):
            EmptyOperator(task_id="one")
"""


def ids_of(store: Store, path: str) -> list[str]:
    return [read_structure(text).id for text in store.files[path].structures]


async def test_a_file_is_read_again_when_a_file_that_it_opened_changes_or_comes(folder: Path, store: Store) -> None:
    write(folder, "conf/a.json", '["a"]')
    write(folder, "generated.py", GENERATED)
    async with running(folder, store):
        assert ids_of(store, "generated.py") == ["a"]
        write(folder, "conf/a.json", '["a", "b"]')
        await until(lambda: ids_of(store, "generated.py") == ["a", "b"])
        write(folder, "conf/c.json", '["c"]')
        await until(lambda: ids_of(store, "generated.py") == ["a", "b", "c"])
        (folder / "conf" / "a.json").unlink()
        await until(lambda: ids_of(store, "generated.py") == ["c"])
        assert not store.files["generated.py"].reread
        calls = store.calls
        (folder / "notes.txt").write_text("nobody reads this")
        write(folder, "other.py", DAG.format(name="other", task="x"))
        await until(lambda: "other.py" in store.files)
        assert store.calls == calls + 1


async def test_a_file_that_another_folder_changes_is_read_again(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.services.parser.manager.SCAN_SECONDS", 0.1)
    (tmp_path / "names.txt").write_text("one")
    text = f"TASK = open({str(tmp_path / 'names.txt')!r}).read()" + DAG.format(name="a", task="x").replace(
        "'x'", "TASK"
    )
    write(folder, "a.py", text)
    async with running(folder, store):
        assert store.task_of("a.py") == "one"
        (tmp_path / "names.txt").write_text("two")
        await until(lambda: store.task_of("a.py") == "two")


async def test_a_file_is_read_again_though_nothing_has_changed_and_says_so(folder: Path, store: Store) -> None:
    write(folder, "a.py", DAG.format(name="a", task="one"))
    async with running(folder, store, reparse_seconds=0.1):
        assert not store.files["a.py"].reread
        await until(lambda: store.calls >= 3)
        assert store.files["a.py"].reread
        write(folder, "a.py", DAG.format(name="a", task="two"))
        await until(lambda: store.task_of("a.py") == "two")


async def test_what_a_file_prints_or_raises_is_said_once_though_it_is_read_again(folder: Path, store: Store) -> None:
    write(folder, "prints.py", "print('hello')" + DAG.format(name="a", task="one"))
    write(folder, "raises.py", "raise ValueError('no dag')")
    with capture_logs() as logs:
        async with running(folder, store, reparse_seconds=0.1):
            await until(lambda: store.calls >= 8)
    said = [(entry["event"], entry["file"]) for entry in logs]
    assert said.count(("a DAG file printed output", "prints.py")) == 1
    # Once more when the folder begins to be watched: what was missing may have come before.
    assert said.count(("a DAG file cannot be read; its DAGs stay unchanged", "raises.py")) <= 2


async def test_a_folder_behind_a_link_that_is_moved_is_read_as_it_is_then(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.services.parser.manager.FOLLOW_SECONDS", 0.1)
    for revision, task in (("a", "one"), ("b", "two")):
        write(tmp_path / f"rev-{revision}", "dags/d.py", DAG.format(name="d", task=task))
    (tmp_path / "current").symlink_to("rev-a")
    async with running(tmp_path / "current" / "dags", store):
        assert store.task_of("d.py") == "one"
        (tmp_path / "new").symlink_to("rev-b")
        (tmp_path / "new").rename(tmp_path / "current")
        await until(lambda: store.task_of("d.py") == "two")
        # The new one is watched.
        write(tmp_path / "rev-b", "dags/d.py", DAG.format(name="d", task="three"))
        await until(lambda: store.task_of("d.py") == "three", seconds=60)


async def test_what_a_fork_cannot_share_is_named(folder: Path, store: Store) -> None:
    write(folder, "a.py", "import starts_thread" + DAG.format(name="a", task="one"))
    write(folder, "b.py", "KEPT = open(__file__)" + DAG.format(name="b", task="one"))
    write(folder, "c.py", "import json" + DAG.format(name="c", task="one"))
    text = "import threading, time, json\nthreading.Thread(target=time.sleep, args=(9,), name='ticks').start()"
    write(folder, "starts_thread.py", text)
    async with running(folder, store):
        said = store.files["a.py"].unshared
        assert said == "runs 1 thread (ticks), since it imports starts_thread"
        assert store.files["b.py"].unshared == f"keeps 1 file or connection open ({folder}/b.py)"
        assert store.files["c.py"].unshared is None
