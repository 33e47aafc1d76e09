from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.dags.file_errors import explain_file_error
from tidemill.services.parser.program import parse_file


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("x = 1\nif x:\n", "(d.py, line 2)"),
        ("from airflow.decorators import task", "use its own names: from tidemill.dags import DAG, task"),
        ("from tidemill.dags import DAG\nDAG('d', schedule_interval='@daily')", "'schedule_interval'; use schedule"),
        (
            "from tidemill.dags import DAG, PythonOperator\n"
            "with DAG('d'): PythonOperator(task_id='a', python_callable=print, provide_context=True)",
            "PythonOperator has no argument 'provide_context'; remove it: a function receives the context values "
            "that its parameters name",
        ),
    ],
)
def test_the_last_line_of_an_error_says_where_it_is_or_what_to_write(tmp_path: Path, text: str, last: str) -> None:
    (tmp_path / "d.py").write_text(text)
    error = parse_file(tmp_path / "d.py", tmp_path).error
    assert error is not None
    assert error.splitlines()[-1].endswith(last)


def test_other_errors_are_left_as_they_are() -> None:
    assert explain_file_error(TypeError("f() got an unexpected keyword argument 'x'")).endswith("'x'")
    assert explain_file_error(ModuleNotFoundError("No module named 'numpy'", name="numpy")).endswith("'numpy'")
    assert explain_file_error(ValueError("no")) == "ValueError: no"
