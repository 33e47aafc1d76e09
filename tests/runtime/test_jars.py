"""The jars of the embedded broker: found in the cache, downloaded once, or an error that says what to do."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from tidemill.core.errors import RemoteError
from tidemill.runtime.jars import KAFKA_COORDINATES, kafka_classpath, resolve_jars


def test_what_is_in_the_cache_is_taken_from_there_even_offline(tmp_path: Path) -> None:
    folder = tmp_path / "tidemill" / "jars" / "thing-1.0"
    folder.mkdir(parents=True)
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TIDEMILL_OFFLINE": "1"}
    assert resolve_jars("org.example:thing:1.0", environ=environ) == folder


def test_offline_without_a_cache_the_error_names_the_switch_and_the_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TIDEMILL_OFFLINE": "1"}
    with pytest.raises(RemoteError, match=r"jars/kafka_2.13-4.3.1 and TIDEMILL_OFFLINE forbids") as caught:
        kafka_classpath(environ=environ)
    assert not caught.value.retryable


def test_a_download_that_fails_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    told: list[str] = []
    # An own resolver configuration with no repository at all: fails at once, and without the network.
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="none"/><resolvers><filesystem name="none">'
        f'<artifact pattern="{tmp_path}/none/[artifact].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {settings}\n")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "SPARK_CONF_DIR": str(tmp_path)}
    environ.pop("TIDEMILL_OFFLINE", None)
    with pytest.raises(RemoteError, match=r"(?s)unresolved dependency.*check the network"):
        resolve_jars("org.example:no-such-thing:1.0", progress=told.append, environ=environ)
    assert told
    assert told[0].startswith("downloading org.example:no-such-thing:1.0")
    left = [path.name for path in (tmp_path / "tidemill" / "jars").iterdir()]
    assert left == [".no-such-thing-1.0.lock"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_broker_s_jars_are_downloaded_into_an_empty_cache(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    folder = resolve_jars(KAFKA_COORDINATES, environ=environ)
    assert any(jar.name.endswith("kafka_2.13-4.3.1.jar") for jar in folder.iterdir())
    assert kafka_classpath(environ={**environ, "TIDEMILL_OFFLINE": "1"}).endswith(f"{folder}/*")


def test_jars_are_kept_in_a_temporary_folder_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"tidemill-cache-{os.getuid()}" / "jars" / "thing-1.0"
    environ = {"XDG_CACHE_HOME": "/dev/null", "TIDEMILL_OFFLINE": "1"}
    with pytest.raises(RemoteError, match=re.escape(str(folder))):
        resolve_jars("group:thing:1.0", environ=environ)
    folder.mkdir(parents=True)
    assert resolve_jars("group:thing:1.0", environ=environ) == folder


def test_a_home_that_cannot_be_looked_into_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> bool:
        if folder.is_relative_to(tmp_path / "home"):
            raise PermissionError(13, "Permission denied", str(folder))
        return folder.exists()

    spare = tmp_path / "spare" / "jars" / "kafka_2.13-9.9"
    spare.mkdir(parents=True)
    monkeypatch.setattr("tidemill.runtime.jars.user_cache_folder", lambda environ: tmp_path / "home")
    monkeypatch.setattr("tidemill.runtime.jars.writable_cache_folder", lambda environ: tmp_path / "spare")
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert resolve_jars("org:kafka_2.13:9.9", environ={}) == spare
