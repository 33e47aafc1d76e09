"""The embedded broker's jars: found in the cache, downloaded once and checked, or an error that says what to do."""

from __future__ import annotations

import base64
import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runtime.repository import HOST, Repository, forwarding, ivy_settings
from tests.until import wait_until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded import jar_mirror, jar_resolver
from tidemill.runtime.embedded.jar_lock import JarLock, parse_jar_lock
from tidemill.runtime.embedded.jars import fetch_jars, kafka_classpath, kafka_lock
from tidemill.runtime.process.table import find_marked

THING = parse_jar_lock("org.example:thing:1.0 3 " + "0" * 64)


@pytest.fixture
def repository() -> Iterator[Repository]:
    server = Repository(parts=8)
    yield server
    server.close()


@pytest.fixture
def environ(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty cache, a mirror, and the certificate of the mirror's authority."""
    monkeypatch.setattr(jar_mirror, "_PAUSE_SECONDS", 0.0)
    repository.authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    inherited = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return inherited | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TIDEMILL_MAVEN_URL": repository.url,
        "SSL_CERT_FILE": str(tmp_path / "authority.pem"),
        "SSL_CERT_DIR": "",
    }


def fill(folder: Path, lock: JarLock, repository: Repository | None = None) -> None:
    folder.mkdir(parents=True)
    for jar in lock.jars:
        content = repository.files[jar.repository_path] if repository else b"x" * jar.size_bytes
        (folder / jar.file_name).write_bytes(content)


def make_spark(home: Path) -> Path:
    for file in (home / "bin" / "spark-submit", home / "jars" / "spark.jar"):
        file.parent.mkdir(parents=True)
        file.touch()
    return home


def test_the_spark_of_pyspark_is_found_where_pyspark_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dist" / "python" / "pyspark"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("pyspark", package / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert jar_resolver.spark_home() == package
    for home in (tmp_path / "dist", package, package / "spark-distribution"):
        make_spark(home)
        assert jar_resolver.spark_home() == home
    (package / "spark-distribution" / "jars" / "spark.jar").unlink()
    (package / "spark-distribution" / "jars").rmdir()
    assert jar_resolver.spark_home() == package


def left_in(environ: dict[str, str]) -> list[str]:
    return sorted(path.name for path in Path(environ["XDG_CACHE_HOME"], "tidemill", "jars").iterdir())


# -- the cache ---------------------------------------------------------------------------------------------------


def test_what_is_in_the_cache_is_taken_from_there_even_offline(tmp_path: Path) -> None:
    folder = tmp_path / "tidemill" / "jars" / "thing-1.0"
    fill(folder, THING)
    assert fetch_jars(THING, environ={"XDG_CACHE_HOME": str(tmp_path), "TIDEMILL_OFFLINE": "1"}) == folder


def test_offline_without_a_cache_the_error_names_the_switch_and_the_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TIDEMILL_OFFLINE": "1"}
    with pytest.raises(RemoteError, match=r"jars/kafka_2.13-4.3.1 and TIDEMILL_OFFLINE forbids") as caught:
        kafka_classpath(environ=environ)
    assert not caught.value.retryable


def test_jars_are_kept_in_a_temporary_folder_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"tidemill-cache-{os.getuid()}" / "jars" / "thing-1.0"
    environ = {"XDG_CACHE_HOME": "/dev/null", "TIDEMILL_OFFLINE": "1"}
    with pytest.raises(RemoteError, match=re.escape(str(folder))):
        fetch_jars(THING, environ=environ)
    fill(folder, THING)
    assert fetch_jars(THING, environ=environ) == folder


def test_a_home_that_cannot_be_looked_into_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: JarLock, folder: Path) -> bool:
        if folder.is_relative_to(tmp_path / "home"):
            raise PermissionError(13, "Permission denied", str(folder))
        return folder.exists()

    spare = tmp_path / "spare" / "jars" / "thing-1.0"
    spare.mkdir(parents=True)
    monkeypatch.setattr("tidemill.runtime.embedded.jars.user_cache_folder", lambda environ: tmp_path / "home")
    monkeypatch.setattr("tidemill.runtime.embedded.jars.writable_cache_folder", lambda environ: tmp_path / "spare")
    monkeypatch.setattr(JarLock, "is_complete", refuse)
    assert fetch_jars(THING, environ={}) == spare


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_folder_that_lost_something_is_downloaded_again(
    damage: str, repository: Repository, environ: dict[str, str]
) -> None:
    folder = fetch_jars(repository.lock, environ=environ)
    victim = folder / repository.lock.jars[3].file_name
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(b"")
    assert fetch_jars(repository.lock, environ=environ) == folder
    assert repository.lock.find_problems(folder) == []
    assert left_in(environ) == [".thing-1.0.lock", "thing-1.0"]


# -- from a mirror -----------------------------------------------------------------------------------------------


def test_a_mirror_is_asked_for_the_locked_jars_alone_and_for_several_at_once(
    repository: Repository, environ: dict[str, str]
) -> None:
    def judge(path: str, number: int) -> int:
        wait_until(lambda: repository.at_once >= 4, what="four requests are there")
        return 200

    repository.judge = judge
    told: list[str] = []
    folder = fetch_jars(repository.lock, progress=told.append, environ=environ)
    assert repository.lock.find_problems(folder) == []
    assert sorted(repository.requests) == sorted(jar.repository_path for jar in repository.lock.jars)
    total = f"{repository.lock.size_bytes / 1e6:.1f} MB"
    assert told[0] == f"downloading org.example:thing:1.0 (once): {total}, looking up the files, 0 s"
    assert told[-1] == f"org.example:thing:1.0: 9 jars, {total}, are in {folder}"
    assert left_in(environ) == [".thing-1.0.lock", "thing-1.0"]


def test_what_fails_for_a_moment_is_requested_again(repository: Repository, environ: dict[str, str]) -> None:
    first = {repository.lock.jars[1].repository_path: 503, repository.lock.jars[2].repository_path: -7}
    repository.judge = lambda path, number: first.get(path, 200) if number == 1 else 200
    folder = fetch_jars(repository.lock, environ=environ)
    assert repository.lock.find_problems(folder) == []
    assert len(repository.requests) == len(repository.lock.jars) + 2


def test_a_password_is_sent_to_the_mirror_and_never_shown(repository: Repository, environ: dict[str, str]) -> None:
    repository.wanted = f"Basic {base64.b64encode(b'me:s3c/ret').decode()}"
    environ["TIDEMILL_MAVEN_URL"] = repository.url.replace("https://", "https://me:s3c%2Fret@")
    fetch_jars(repository.lock, environ=environ)
    repository.wanted = "another"
    with pytest.raises(RemoteError, match=r"401.*https://user:password@host") as caught:
        fetch_jars(kafka_lock(), environ=environ)
    assert "s3c" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "said"), [(404, "404 .*root of a repository"), (403, "403 Forbidden"), (503, "503 Service")]
)
def test_a_mirror_that_does_not_answer_with_a_jar_is_named_with_the_reason(
    status: int, said: str, repository: Repository, environ: dict[str, str]
) -> None:
    repository.judge = lambda path, number: status
    with pytest.raises(RemoteError, match=rf"{re.escape(repository.url)}/org/example/\S+\.jar: .*{said}"):
        fetch_jars(repository.lock, environ=environ)
    assert left_in(environ) == [".thing-1.0.lock"]


def test_a_mirror_whose_authority_is_unknown_is_refused_with_advice(
    repository: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    stranger = Repository()
    stranger.close()
    stranger.authority.cert_pem.write_to_path(tmp_path / "stranger.pem")
    environ["SSL_CERT_FILE"] = str(tmp_path / "stranger.pem")
    with pytest.raises(RemoteError, match=r"certificate is not trusted.*set SSL_CERT_FILE"):
        fetch_jars(repository.lock, environ=environ)


@pytest.mark.parametrize("url", ["repo.example", "ftp://repo.example/maven", "https:///maven"])
def test_what_is_not_the_address_of_a_mirror_is_refused(url: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="TIDEMILL_MAVEN_URL is not the address"):
        fetch_jars(THING, environ=environ | {"TIDEMILL_MAVEN_URL": url})


@pytest.mark.parametrize("longer", [False, True])
def test_a_jar_that_is_not_the_locked_one_is_named_and_nothing_is_kept(
    longer: bool, repository: Repository, environ: dict[str, str]
) -> None:
    path = repository.lock.jars[2].repository_path
    content = repository.files[path]
    repository.files[path] = content + b"!" if longer else bytes([content[0] ^ 1]) + content[1:]
    said = "is 1,[0-9]{3} bytes long, expected" if longer else "has the SHA-256 [0-9a-f]{64}, expected"
    with pytest.raises(RemoteError, match=f"org.example:part-1:1.0 {said}.*They were discarded") as caught:
        fetch_jars(repository.lock, environ=environ)
    assert not caught.value.retryable
    assert left_in(environ) == [".thing-1.0.lock"]


def test_a_full_disk_is_named_with_what_helps(
    repository: Repository, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jar_mirror.Mirror._copy

    def fill_up(mirror: jar_mirror.Mirror, jar: object, target: Path, *rest: object) -> None:
        if "part-4" in target.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        time.sleep(0.1)  # so that it is still being written when the other one fails
        real(mirror, jar, target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(jar_mirror.Mirror, "_copy", fill_up)
    with pytest.raises(RemoteError, match=r"cannot be saved in .*: No space left.*make room for .*XDG_CACHE_HOME"):
        fetch_jars(repository.lock, environ=environ)
    assert not [thread for thread in threading.enumerate() if thread.name == jar_mirror.THREAD]
    assert left_in(environ) == [".thing-1.0.lock"]


def test_two_starts_at_once_download_once(repository: Repository, environ: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: fetch_jars(repository.lock, environ=environ), range(2))
    assert first == second
    assert len(repository.requests) == len(repository.lock.jars)


FETCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts beside itself ignores it
from pathlib import Path
from tidemill.runtime.embedded.jar_lock import parse_jar_lock
from tidemill.runtime.embedded.jars import fetch_jars
fetch_jars(parse_jar_lock(Path(sys.argv[1]).read_text()))
"""


def start_fetching(repository: Repository, environ: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    text = "".join(f"{jar.coordinates} {jar.size_bytes} {jar.sha256}\n" for jar in repository.lock.jars)
    (folder / "thing.lock").write_text(text)
    return subprocess.Popen([sys.executable, "-c", FETCH, str(folder / "thing.lock")], env=environ)


def test_a_start_that_was_killed_leaves_nothing_that_the_next_one_uses(
    repository: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    slow = repository.lock.jars[5].repository_path
    repository.judge = lambda path, number: None if path == slow else 200
    with start_fetching(repository, environ, tmp_path) as process:
        wait_until(lambda: len(set(repository.requests)) == len(repository.lock.jars), what="one jar is left")
        process.kill()
    assert "thing-1.0" not in left_in(environ)
    assert any(name.startswith(".thing-1.0-") for name in left_in(environ))
    repository.judge = lambda path, number: 200
    assert repository.lock.find_problems(fetch_jars(repository.lock, environ=environ)) == []
    assert left_in(environ) == [".thing-1.0.lock", "thing-1.0"]


# -- by Spark's resolver -----------------------------------------------------------------------------------------


def test_a_download_that_fails_says_why_and_leaves_nothing_behind(environ: dict[str, str], tmp_path: Path) -> None:
    told: list[str] = []
    # Fails at once, and without the network.
    (tmp_path / "conf").mkdir()
    ivy_settings(tmp_path / "conf", f"file://{tmp_path}/none/")
    del environ["TIDEMILL_MAVEN_URL"]
    with pytest.raises(RemoteError, match=r"(?s)check the network.*unresolved dependency") as caught:
        fetch_jars(THING, progress=told.append, environ=environ | {"SPARK_CONF_DIR": str(tmp_path / "conf")})
    assert not any(text in str(caught.value) for text in ("JDK_JAVA_OPTIONS", "\tat "))
    assert re.fullmatch(r"downloading org\.example:thing:1\.0 \(once\): .* MB, looking up the files, 0 s", told[0])
    assert left_in(environ) == [".thing-1.0.lock"]


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("java.io.IOException: No space left on device", "the disk is full: make room"),
        ("Server returned HTTP response code: 407 for URL", "HTTPS_PROXY=http://user:password@host:port"),
        ("javax.net.ssl.SSLHandshakeException: PKIX path building failed", "set SSL_CERT_FILE"),
        ("java.net.UnknownHostException: repo.example", "set a mirror in TIDEMILL_MAVEN_URL"),
    ],
)
def test_what_the_resolver_says_becomes_advice(
    said: str, advice: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lock: JarLock, ivy: Path, log: Path, *rest: object) -> int:
        log.write_text(f"{said}\n\tat org.example.Thing")
        return 1

    monkeypatch.setattr(jar_resolver, "_run", fail)
    del environ["TIDEMILL_MAVEN_URL"]
    with pytest.raises(RemoteError, match=re.escape(advice)) as caught:
        fetch_jars(THING, environ=environ)
    assert str(caught.value).endswith(said)
    assert left_in(environ) == [".thing-1.0.lock"]


@pytest.mark.long
def test_the_resolver_goes_through_the_proxy_and_trusts_the_system_s_authorities(
    repository: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "söme folder"
    folder.mkdir()
    visible: list[str] = []
    mark = f"TIDEMILL_TEST={folder}"
    environ |= {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "SPARK_CONF_DIR": str(tmp_path),
        "TIDEMILL_TEST": str(folder),
        "no_proxy": "",
        "LC_ALL": "C",
    }
    del environ["TIDEMILL_MAVEN_URL"]
    ivy_settings(tmp_path, f"https://{HOST}/maven/")

    def look() -> None:
        visible.extend(find_marked(mark).values())

    with forwarding(repository.port, "me", "s3c ret", look) as port:
        environ["https_proxy"] = f"http://me:s3c%20ret@127.0.0.1:{port}"
        found = fetch_jars(repository.lock, environ=environ)
    assert repository.lock.find_problems(found) == []
    assert any("SparkSubmit" in command for command in visible)
    assert not [command for command in visible if "s3c" in command]


@pytest.mark.long
def test_an_authority_that_the_system_does_not_know_is_refused_with_advice(
    repository: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    stranger = Repository()
    stranger.close()
    stranger.authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    del environ["TIDEMILL_MAVEN_URL"]
    ivy_settings(tmp_path, f"{repository.url}/")
    with pytest.raises(RemoteError, match="set SSL_CERT_FILE to a file"):
        fetch_jars(repository.lock, environ=environ | {"SPARK_CONF_DIR": str(tmp_path)})
    assert repository.requests == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_resolver_ends_with_the_process_that_started_it(
    number: signal.Signals, repository: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    repository.judge = lambda path, number: None if path.endswith(".jar") else 200
    del environ["TIDEMILL_MAVEN_URL"]
    environ |= {"SPARK_CONF_DIR": str(tmp_path), "TIDEMILL_TEST": str(tmp_path)}
    ivy_settings(tmp_path, f"{repository.url}/")
    with start_fetching(repository, environ, tmp_path) as process:
        wait_until(lambda: any(path.endswith(".jar") for path in repository.requests), what="a jar is requested")
        process.send_signal(number)
    wait_until(lambda: not find_marked(f"TIDEMILL_TEST={tmp_path}"), what="nothing of it is left")
    assert "thing-1.0" not in left_in(environ)
