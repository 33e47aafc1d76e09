from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tidemill.services.parser.files import find_files, is_relevant


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("dag")


def test_links_to_folders_are_followed_and_no_folder_is_read_twice(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, "a.py", "real/b.py")
    write(tmp_path, "elsewhere/c.py", "elsewhere/below/d.py")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "again").symlink_to("real")
    (folder / "real" / "loop").symlink_to("..")
    (folder / "itself").symlink_to("itself")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    (folder / "broken").symlink_to("nowhere")
    (folder / "file.py").symlink_to(tmp_path / "elsewhere" / "c.py")
    (tmp_path / "link").symlink_to(folder)
    expected = ["a.py", "file.py", "linked/below/d.py", "linked/c.py", "real/b.py"]
    assert find_files(folder) == find_files(tmp_path / "link") == expected


def test_what_ignore_files_name_is_left_out_by_the_rules_of_gitignore(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.py",
        "test_a.py",
        "lib/x.py",
        "below/lib/x.py",
        "below/a.py",
        "below/test_kept.py",
        "below/top.py",
        "top.py",
    )
    assert len(find_files(tmp_path)) == 8
    (tmp_path / ".airflowignore").write_text("# what is no DAG\ntest_*.py\nlib/\n/top.py\n\n")
    (tmp_path / "below" / ".airflowignore").write_text("!test_kept.py\na.py\n")
    assert find_files(tmp_path) == ["a.py", "below/test_kept.py", "below/top.py"]
    assert is_relevant(str(tmp_path / "below" / ".airflowignore"))


def test_a_wrong_pattern_is_named_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py")
    (tmp_path / ".airflowignore").write_text("!\nb.py")
    with capture_logs() as logs:
        assert find_files(tmp_path) == ["a.py"]
    assert [(entry["line"], entry["file"]) for entry in logs] == [(1, str(tmp_path / ".airflowignore"))]
