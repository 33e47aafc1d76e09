"""`tidemill init`: creates a small runnable project from the files in `templates/`."""

from __future__ import annotations

import ast
import builtins
import enum
import keyword
import re
import shlex
import unicodedata
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError


class Template(enum.StrEnum):
    """The kinds of projects, mostly by the target of their results."""

    FILES = "files"
    POSTGRES = "postgres"
    HTTP = "http"
    REDIS = "redis"
    EXACTLY_ONCE = "exactly-once"
    DAGS = "dags"


@dataclass(frozen=True)
class _Words:
    """Texts for the README of a template.

    Attributes:
        topic: The source topic.
        about: What the project does.
        send: A command that sends some messages.
        show: A command that shows the results.
        extra: The extra of tidemill that the project requires.
        needs: Services that it requires besides Kafka.
    """

    topic: str
    about: str
    send: str
    show: str
    extra: str = ""
    needs: str = ""


_WORDS: Mapping[Template, _Words] = {
    Template.FILES: _Words(
        "lines",
        "Lines of text come from a Kafka topic, a program converts each to upper case, and the results go to\n"
        "`output/results.jsonl`.",
        r"printf 'hello\ntide mill\n' | tidemill send lines --config tidemill.yaml",
        "cat output/results.jsonl",
    ),
    Template.POSTGRES: _Words(
        "texts",
        "Texts with an id come from a Kafka topic as JSON, a program counts the words of each, and the counts go to\n"
        "the PostgreSQL table `word_counts`, one row per id.",
        r"""printf '{"id": 1, "text": "tide mill"}\n' | tidemill send texts --key id --config tidemill.yaml""",
        "psql postgresql://postgres@localhost:5432/postgres -c 'SELECT * FROM word_counts'",
        "postgres",
        "It needs PostgreSQL at the `dsn` in `tidemill.yaml`; the table is created at startup.",
    ),
    Template.HTTP: _Words(
        "documents",
        "Messages come from a Kafka topic, a program computes the checksum of each, and it is posted to a web service.",
        r"printf 'hello\ntide mill\n' | tidemill send documents --config tidemill.yaml",
        "tidemill consume documents --config tidemill.yaml  # shows the input; service.py shows the posts",
        "http",
        "It posts to the `url` in `tidemill.yaml`. In another terminal, run a service that shows what is posted:\n\n"
        "    python service.py",
    ),
    Template.REDIS: _Words(
        "texts",
        "Texts come from a Kafka topic, a program converts each to upper case, and Redis keeps the newest text of\n"
        "each key.",
        r"""printf '{"user": "ann", "says": "hello"}\n' | tidemill send texts --key user --config tidemill.yaml""",
        "redis-cli GET PROJECT_NAME:ann",
        "redis",
        "It needs Redis at the `url` in `tidemill.yaml`.",
    ),
    Template.EXACTLY_ONCE: _Words(
        "lines",
        "Lines of text come from a Kafka topic, a program sorts the words of each, and the results go to the topic\n"
        "`PROJECT_NAME-sorted`. Results and offsets are committed in one transaction: readers with `read_committed`\n"
        "see each result once.",
        r"printf 'tide mill ebb\n' | tidemill send lines --config tidemill.yaml",
        "tidemill consume PROJECT_NAME-sorted --config tidemill.yaml",
    ),
}

#: Target paths of the files of every pipeline project, and of each template.
_COMMON = {".gitignore": "gitignore.txt", "pyproject.toml": "pyproject.toml.txt", "README.md": "README.md.txt"}
_OWN = {
    "handler.py": "handler.py.txt",
    "tidemill.yaml": "tidemill.yaml.txt",
    "tests/test_handler.py": "test_handler.py.txt",
}
_MORE = {Template.HTTP: {"service.py": "service.py.txt"}}
#: A project with DAGs shares no files with pipelines.
_DAG_FILES = {
    "dags/daily_report.py": "daily_report.py.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
#: Packages that every project installs; a project of the same name would depend on itself.
_INSTALLED = ("tidemill", "pytest", "pytest-asyncio")


def init(
    # A str, because Path('') means the current folder.
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The new project's folder.")],
    template: Annotated[
        Template,
        typer.Option(
            "--template",
            metavar="NAME",
            help="The target of a pipeline's results: files, postgres, http, redis or exactly-once (another topic); or "
            "dags, for DAGs.",
        ),
    ] = Template.FILES,
) -> None:
    """Create a small project that runs as it is: a pipeline with configuration and test, or DAGs.

    Existing files are never overwritten.
    """
    with reporting():
        if not directory:
            raise ConfigError("the name of the folder is empty; write a name, or . for this folder")
        for path in create_project(Path(directory), template):
            typer.echo(f"created {path}")
        typer.echo(f"\nnext: cd {shlex.quote(directory)} and read README.md")


def create_project(directory: Path, template: Template = Template.FILES) -> list[Path]:
    """Write the project's files and return their paths.

    Raises:
        ConfigError: A file already exists, or the folder cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; choose another name")
    texts = _fill_in(directory.resolve().name, template)
    existing = [str(directory / name) for name in texts if (directory / name).exists()]
    if existing:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ConfigError(f"nothing was written, because {', '.join(existing)} already {verb}; choose another folder")
    created = []
    try:
        for target, text in texts.items():
            path = directory / target
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x" never overwrites files that were created since the check above.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            created.append(path)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    return created


def _fill_in(folder: str, template: Template) -> dict[str, str]:
    """Return the text of each file."""
    root = files("tidemill.cli") / "templates"
    if template is Template.DAGS:
        written = {target: (root / template / name).read_text(encoding="utf-8") for target, name in _DAG_FILES.items()}
        return {target: text.replace("PROJECT_NAME", make_project_name(folder)) for target, text in written.items()}
    own = _OWN | _MORE.get(template, {})
    texts = {target: (root / "common" / name).read_text(encoding="utf-8") for target, name in _COMMON.items()}
    texts |= {target: (root / template / name).read_text(encoding="utf-8") for target, name in own.items()}
    taken = {name for target, text in texts.items() if target.endswith(".py") for name in _find_names(text)}
    words = _WORDS[template]
    filled = {
        "ABOUT": words.about + "\n",
        "NEEDS": f"\n{words.needs}\n" if words.needs else "",
        "SEND": words.send,
        "SHOW": words.show,
        "SOURCE_TOPIC": words.topic,
        "[EXTRAS]": f"[{words.extra}]" if words.extra else "",
        # Last, because the texts above contain these placeholders.
        "PROJECT_NAME": make_project_name(folder),
        "CLASS_NAME": make_class_name(folder, taken),
    }
    for placeholder, text in filled.items():
        texts = {target: written.replace(placeholder, text) for target, written in texts.items()}
    return texts


def _find_names(code: str) -> set[str]:
    """Return the names that a file imports, defines or uses; a class with such a name would hide them."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def make_project_name(folder: str) -> str:
    """Return a name for the project and its consumer group.

    Example:
        >>> make_project_name("My Project"), make_project_name("---"), make_project_name("tidemill")
        ('my-project', 'pipeline', 'tidemill-pipeline')
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", _drop_accents(folder).lower()).strip("-._") or "pipeline"
    return f"{name}-pipeline" if _normalize(name) in _find_packages() else name


def _drop_accents(name: str) -> str:
    """Return a name without accents; letters without an ASCII form stay.

    Example:
        >>> _drop_accents("Müller-Été")
        'Muller-Ete'
    """
    return "".join(char for char in unicodedata.normalize("NFKD", name) if not unicodedata.combining(char))


def _find_packages() -> set[str]:
    """Return the packages that a project installs, including the dependencies of tidemill."""
    try:
        required = metadata.requires("tidemill") or []
    except metadata.PackageNotFoundError:
        required = []  # tidemill runs from a checkout
    return {_normalize(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in (*_INSTALLED, *required)}


def _normalize(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package.lower())


def make_class_name(folder: str, taken: Container[str] = ()) -> str:
    """Return a name for the handler's class.

    Args:
        folder: The name of the project's folder.
        taken: Names that the class must not have.

    Example:
        >>> make_class_name("order-mails"), make_class_name("2024"), make_class_name("handler", ["Handler"])
        ('OrderMails', 'Pipeline2024', 'HandlerPipeline')
    """
    name = (
        "".join(part[0].upper() + part[1:] for part in re.findall(r"[A-Za-z0-9]+", _drop_accents(folder))) or "Pipeline"
    )
    if not name[0].isalpha():
        name = f"Pipeline{name}"
    reserved = keyword.iskeyword(name) or hasattr(builtins, name) or name in taken
    return f"{name}Pipeline" if reserved else name
