"""`tidemill init`: the project runs as it is, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.cli.init import Template, create_project, make_class_name, make_project_name
from tidemill.config.loading import load_settings
from tidemill.core.errors import ConfigError
from tidemill.runtime.process.exitcode import ExitCode

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: What every project has.
FILES = {".gitignore", "pyproject.toml", "README.md", "handler.py", "tidemill.yaml", "tests/test_handler.py"}
#: Runs the tests of several projects in one process; each has modules of the same names.
RUN_TESTS = """
import os, sys, pytest
root = os.getcwd()
codes = {}
for name in sys.argv[1:]:
    os.chdir(os.path.join(root, name))
    for module in ("handler", "test_handler"):
        sys.modules.pop(module, None)
    path = list(sys.path)
    print(f"== {name}", flush=True)
    codes[name] = int(pytest.main(["-q", "-p", "no:cacheprovider"]))
    sys.path[:] = path
sys.exit(f"{codes}" if any(codes.values()) else 0)
"""


def test_all_files_are_there_and_the_configuration_is_valid(tidemill: Run, tmp_path: Path) -> None:
    done = tidemill("init", "My Project")

    folder = tmp_path / "My Project"
    assert done.returncode == 0, done.stderr
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == FILES
    assert load_settings(folder / "tidemill.yaml", {}).kafka.consumer_group == "my-project"
    assert "class MyProject(Handler" in (folder / "handler.py").read_text()
    assert "cd 'My Project' and read README.md" in done.stdout


PIPELINES = [template for template in Template if template is not Template.DAGS]


@pytest.mark.parametrize("template", PIPELINES)
def test_every_template_is_filled_in_and_configured(template: Template, tmp_path: Path) -> None:
    folder = tmp_path / "order-mails"
    created = {str(path.relative_to(folder)) for path in create_project(folder, template)}

    assert created - FILES == ({"service.py"} if template is Template.HTTP else set())
    for name in created:
        text = (folder / name).read_text()
        for placeholder in ("PROJECT_NAME", "CLASS_NAME", "EXTRAS", "ABOUT", "NEEDS", "SOURCE_TOPIC", "SEND", "SHOW"):
            assert placeholder not in text, name
    settings = load_settings(folder / "tidemill.yaml", {})
    assert not settings.sinks.is_empty()
    assert settings.kafka.exactly_once == (template is Template.EXACTLY_ONCE)
    readme = (folder / "README.md").read_text()
    assert "handler:OrderMails" in readme
    assert f"tidemill send {settings.kafka.source_topic} " in readme
    assert settings.dlq_topic in readme
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    wanted = {Template.POSTGRES: "[postgres]", Template.HTTP: "[http]", Template.REDIS: "[redis]"}.get(template, "")
    assert project["dependencies"] == [f"tidemill{wanted}"]
    assert "output/" in (folder / ".gitignore").read_text().splitlines()


def test_a_project_of_dags_runs_as_it_is(tidemill: Run, tmp_path: Path) -> None:
    create_project(tmp_path, Template.DAGS)
    (tmp_path / "words.txt").write_text("tide mill tide")

    done = tidemill("dags", "test", "daily_report", "--folder", str(tmp_path / "dags"))

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.txt").read_text() == "1 mill\n2 tide\n"
    assert "PROJECT_NAME" not in (tmp_path / "README.md").read_text()


@pytest.mark.long
def test_the_tests_of_all_templates_pass(tmp_path: Path) -> None:
    for template in PIPELINES:
        create_project(tmp_path / template, template)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEMILL_", "PYTEST_"))}

    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, *PIPELINES],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed") == len(PIPELINES), done.stdout


def test_a_folder_without_a_name_is_refused_and_nothing_is_written(tidemill: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = tidemill("init", "")

    assert done.returncode == ExitCode.CONFIG
    assert "the name of the folder is empty" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_template_is_refused_with_the_known_ones(tidemill: Run, tmp_path: Path) -> None:
    done = tidemill("init", "project", "--template", "mongo")

    assert done.returncode == ExitCode.CONFIG
    assert "exactly-once" in done.stderr
    assert not (tmp_path / "project").exists()


@pytest.mark.parametrize(
    ("folder", "project", "cls"),
    [
        ("capitals", "capitals", "Capitals"),
        ("order-mails", "order-mails", "OrderMails"),
        ("orderMails", "ordermails", "OrderMails"),
        ("2024", "2024", "Pipeline2024"),
        ("---", "pipeline", "Pipeline"),
        ("any", "any", "AnyPipeline"),
        ("true", "true", "TruePipeline"),
        ("handler", "handler", "HandlerPipeline"),
        ("tidemill", "tidemill-pipeline", "Tidemill"),
        ("PyTest_asyncio", "pytest_asyncio-pipeline", "PyTestAsyncio"),
        ("pydantic", "pydantic-pipeline", "Pydantic"),
        ("\u00fcber uns", "uber-uns", "UberUns"),
    ],
)
def test_names_are_made_from_the_folder(folder: str, project: str, cls: str) -> None:
    assert make_project_name(folder) == project
    assert make_class_name(folder, ["Handler", "Any"]) == cls


@pytest.mark.parametrize("folder", ["2024", "1.5", "on", "null", "2026-11-22"])
def test_a_name_that_yaml_reads_as_something_else_is_still_a_name(folder: str, tmp_path: Path) -> None:
    for template in PIPELINES:
        create_project(tmp_path / template / folder, template)
        settings = load_settings(tmp_path / template / folder / "tidemill.yaml", {})
        assert settings.kafka.consumer_group == folder


@pytest.mark.parametrize(
    ("template", "name", "cls"),
    [
        (Template.FILES, "path", "PathPipeline"),
        (Template.FILES, "SETTINGS", "SETTINGSPipeline"),
        (Template.POSTGRES, "text", "TextPipeline"),
        (Template.POSTGRES, "base_model", "BaseModelPipeline"),
        (Template.FILES, "text", "Text"),
    ],
)
def test_the_class_hides_no_name_of_the_project_s_files(
    template: Template, name: str, cls: str, tmp_path: Path
) -> None:
    create_project(tmp_path / name, template)

    assert f"class {cls}(Handler[" in (tmp_path / name / "handler.py").read_text()


def test_the_commands_of_the_readme_exist(tidemill: Run, tmp_path: Path) -> None:
    create_project(tmp_path / "project")
    readme = (tmp_path / "project" / "README.md").read_text()

    commands = {line.split()[1] for line in readme.splitlines() if line.startswith("    tidemill ")}

    assert commands == {"doctor", "run"}
    for command in (*commands, "send"):
        assert tidemill(command, "--help").returncode == 0


def test_nothing_is_written_where_something_would_be_overwritten(tidemill: Run, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "handler.py").write_text("mine")

    done = tidemill("init", "project")

    assert done.returncode == ExitCode.CONFIG
    assert "nothing was written" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["handler.py"]
    assert (folder / "handler.py").read_text() == "mine"


def test_a_folder_with_other_files_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")

    assert len(create_project(tmp_path)) == len(FILES)


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        create_project(tmp_path / "file" / "project")
    with pytest.raises(ConfigError, match="file is not a folder"):
        create_project(tmp_path / "file")
