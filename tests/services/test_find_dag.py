"""Which file of a folder `dags test` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.services import dag_test
from tidemill.services.dag_test import find_dag

FILE = """
from tidemill.dags import DAG, EmptyOperator

with DAG("daily_report"):
    EmptyOperator(task_id="first")
"""


def test_a_misspelt_dag_is_not_found_and_the_nearest_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FILE)
    assert find_dag(tmp_path, "daily_report")[0].name == "a.py"
    with pytest.raises(ConfigError, match=r"defines the DAG 'dailyreport'; did you mean 'daily_report'\?$"):
        find_dag(tmp_path, "dailyreport")
    with pytest.raises(ConfigError, match=r"defines the DAG 'x'$"):
        find_dag(tmp_path, "x")


def test_a_traceback_is_printed_only_for_an_error_in_the_file_s_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle.py").write_text(
        f"{FILE}    a, b = EmptyOperator(task_id='a'), EmptyOperator(task_id='b')\n    a >> b >> a\n"
    )
    with pytest.raises(ConfigError, match="the dependencies form a cycle: a >> b >> a"):
        find_dag(tmp_path, "daily_report")
    assert capsys.readouterr().err == ""
    (tmp_path / "circle.py").write_text(f"{FILE}    EmptyOperator(task_id='first')\n")
    with pytest.raises(ConfigError, match="daily_report"):
        find_dag(tmp_path, "daily_report")
    assert 'circle.py", line 6' in capsys.readouterr().err
    (tmp_path / "circle.py").write_text(f"{FILE}    a b\n")
    with pytest.raises(ConfigError, match="SyntaxError"):
        find_dag(tmp_path, "daily_report")
    assert 'circle.py", line 6' in capsys.readouterr().err


def test_an_interrupt_shows_where_a_file_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.py").write_text(f"def slow():\n    raise KeyboardInterrupt\nslow()\n{FILE}")
    with pytest.raises(KeyboardInterrupt):
        find_dag(tmp_path, "daily_report")
    said = capsys.readouterr().err
    assert "interrupted while importing slow.py" in said
    assert 'slow.py", line 2, in slow' in said


def test_a_file_that_takes_long_is_named_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dag_test, "SLOW_SECONDS", 0.01)
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(0.5)\n{FILE}")
    find_dag(tmp_path, "daily_report")
    assert "still importing slow.py after 0.01 s" in capsys.readouterr().err
