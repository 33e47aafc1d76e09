"""What a list of triggers may say, and what is said about one that is wrong."""

from __future__ import annotations

import time

import pytest

from tidemill.core.errors import ConfigError
from tidemill.services.triggerer.lists.file import read_entries
from tidemill.store.records import TriggerSpec


def read_specs(path):
    return [spec for _, spec in read_entries(path)]


def written(tmp_path, text):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


def test_a_list_is_read_in_its_order_with_its_defaults(tmp_path):
    text = """
    - {name: one, classpath: package.module.Class}
    - {name: two, classpath: package.Class, kwargs: {b: [1, x], a: null}, restart: always}
    """
    assert read_specs(written(tmp_path, text)) == [
        TriggerSpec("one", "package.module.Class", "{}", "on-failure"),
        TriggerSpec("two", "package.Class", '{"a": null, "b": [1, "x"]}', "always"),
    ]


def test_an_empty_list_is_a_list(tmp_path):
    assert read_specs(written(tmp_path, "[]")) == []


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "{}"])
def test_a_file_without_a_list_is_refused_so_that_one_that_is_cut_off_removes_nothing(tmp_path, text):
    with pytest.raises(ConfigError, match=r"is empty; write \[\]"):
        read_specs(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b", "expected a list of triggers"),
        ("[", "not valid YAML"),
        ("- one", "entry 1: expected a mapping with name and classpath, got 'one'"),
        ("- {classpath: a.B}", "entry 1: name is missing; give the trigger a name of its own"),
        ("- {name: 7, classpath: a.B}", "entry 1: name must be 1 to 200 printable characters"),
        ("- {name: x, clas: a.B}", "entry 1 (x): unknown key 'clas'; did you mean 'classpath'?"),
        ("- {name: x, classpath: a.B, zzz: 1}", "unknown key 'zzz'; known keys: name, classpath, kwargs, restart"),
        ("- {name: x}", "entry 1 (x): classpath is missing; write package.module.Class"),
        ("- {name: x, classpath: B}", "classpath must be like package.module.Class, got 'B'"),
        ("- {name: x, classpath: 'a:B'}", "classpath must be like package.module.Class, got 'a:B'"),
        (
            "- {name: x, classpath: a.B, kwargs: [1]}",
            "kwargs must be a mapping of argument names to values",
        ),
        (
            "- {name: x, classpath: a.B, kwargs: {1: 2}}",
            "entry 1: kwargs.1: YAML reads this key as a value of type int",
        ),
        ("- {name: x, classpath: a.B, name: y}", "entry 1: name: duplicate key"),
        ("- {name: x, classpath: a.B, kwargs: {a: !thing b}}", "has an unknown tag"),
        ("- {name: x, classpath: a.B, kwargs: {at: 2030-01-01}}", "put times and dates in quotes"),
        ("- {name: x, classpath: a.B, kwargs: {n: .nan}}", "JSON has no .nan and no .inf"),
        ("- {name: '  ', classpath: a.B}", "entry 1: name must be 1 to 200 printable characters"),
        ('- {name: "a\\e[2J", classpath: a.B}', "not only spaces; got 'a\\x1b[2J'"),
        (f"- {{name: {'x' * 201}, classpath: a.B}}", "got 201 characters"),
        (
            "- {name: x, classpath: a.B, kwargs: {a: " + "[" * 5000 + "]" * 5000 + "}}",
            r":1: nested more than 100 levels deep",
        ),
        ("- {name: x, classpath: a.B, restart: sometimes}", "restart must be one of always, on-failure, never"),
        ("- {name: x, classpath: a.B, restart: [always]}", "restart must be one of"),
        ("- {name: x, classpath: a.B}\n- {name: x, classpath: a.C}", "spec.yaml:2: duplicate name 'x'; first used at"),
        ("[{name: x, classpath: a.B}, {name: x, classpath: a.B}]", "duplicate name 'x'; first used at"),
    ],
)
def test_errors_name_their_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        read_specs(written(tmp_path, text))
    assert said in str(caught.value)
    assert str(tmp_path / "spec.yaml") in str(caught.value)


@pytest.mark.parametrize("rest", ["", ", x: !thing y", ", x: [", ", 1: 2", ", x: 2030-13-45"])
def test_errors_contain_no_secrets(tmp_path, rest):
    text = f"- {{name: 7, classpath: a.B, kwargs: {{password: hunter2{rest}}}}}"
    with pytest.raises(ConfigError) as caught:
        read_specs(written(tmp_path, text))
    assert "hunter2" not in str(caught.value)


def test_ten_thousand_entries_are_read_soon(tmp_path):
    entries = (f"- name: t{n}\n  classpath: a.B\n  kwargs: {{number: {n}}}\n" for n in range(10_000))
    path = written(tmp_path, "".join(entries))
    began = time.process_time()
    assert len(read_specs(path)) == 10_000
    # 0.9 s; the loader that is not written in C takes four times as long.
    assert time.process_time() - began < 2.5


def test_all_problems_are_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_specs(written(tmp_path, "- {name: x}\n- {classpath: a.B}\n- 3"))
    assert len(str(caught.value).splitlines()) == 3


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"spec\.yaml does not exist; give the path of its YAML file"):
        read_specs(tmp_path / "spec.yaml")
    (tmp_path / "specs.yml").touch()
    with pytest.raises(ConfigError, match=r"spec\.yaml does not exist; did you mean .*/specs\.yml\?"):
        read_specs(tmp_path / "spec.yaml")
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder"):
        read_specs(tmp_path)
