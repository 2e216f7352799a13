"""The content digest, ignore files, and what is carried into a VM."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from dayfly.errors import TaskError
from dayfly.tasks import load_task, read_task_files, script_command, select


def harbor_digest(folder: Path, names: list[str]) -> str:
    """The published rule, written down a second time."""
    outer = hashlib.sha256()
    for name in sorted(names):
        outer.update(f"{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return "sha256:" + outer.hexdigest()


BASE = ["instruction.md", "solution/solve.sh", "task.toml", "tests/test.sh"]


def test_the_digest_is_harbors(make_task):
    folder = make_task(
        files={
            "README.md": "r",
            "environment/a/b.txt": "b",
            "tests/ü.py": "x",
            "other/file": "not a part of the task",
            "tests/__pycache__/x.pyc": "ignored by default",
            "notes~": "",
        }
    )
    files = read_task_files(folder)
    assert files.digest == harbor_digest(folder, [*BASE, "README.md", "environment/a/b.txt", "tests/ü.py"])
    assert load_task(folder, strict=False).digest == files.digest


def test_the_digest_of_a_known_task_is_what_harbor_says(tmp_path):
    # The value was computed with the packager of Harbor 0.25.0.
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Say hello.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "tests/.harborignore": "*.tmp\n",
        "tests/left.tmp": "x",
        "solution/solve.sh": "#!/bin/sh\n",
        "environment/data.txt": "1\n",
        ".gitignore": "*.log\n",
        "environment/a.log": "x",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (
        read_task_files(tmp_path).digest
        == "sha256:61b138b551d50135b7bf9726fc33b37e8d0ee8ddd105cf37101a8c54718954ec"
    )


def test_the_digest_of_a_known_multi_step_task_is_what_harbor_says(tmp_path):
    # The value was computed with the packager of Harbor 0.25.0.
    for name, text in {
        "task.toml": '[[steps]]\nname = "b"\n[[steps]]\nname = "a"\n',
        "instruction.md": "Not used.\n",
        "tests/test.sh": "#!/bin/sh\n",
        "steps/a/instruction.md": "A.\n",
        "steps/a/tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "steps/a/tests/.harborignore": "*.tmp\n",
        "steps/a/tests/left.tmp": "x",
        "steps/a/workdir/setup.sh": "true\n",
        "steps/a/workdir/__pycache__/x.pyc": "x",
        "steps/a/solution/solve.sh": "#!/bin/sh\n",
        "steps/b/instruction.md": "B.\n",
        "steps/b/trajectory.json": "{}\n",
        "steps/b/workdir/.harborignore": "*.tmp\n",
        "steps/b/workdir/kept.tmp": "x",
        "steps/c/notes.md": "stray\n",
        "environment/Dockerfile": "FROM x\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (
        read_task_files(tmp_path).digest
        == "sha256:9cd0a92f8fa19071ccaa1c362326a0be4a48f422c3554fed71212ed9b7c69956"
    )


@pytest.mark.parametrize("change", ["tests/test.sh", "instruction.md", "environment/x", "solution/solve.sh"])
def test_any_change_changes_the_digest(make_task, change):
    before = read_task_files(make_task(files={"environment/x": "1"})).digest
    assert read_task_files(make_task(files={"environment/x": "1", change: "changed"})).digest != before


def test_each_ignore_file_counts_for_its_purpose_only_and_is_reported(make_task):
    folder = make_task(
        files={
            ".gitignore": "data.bin\n",
            "tests/data.bin": "needed",
            "tests/draft.py": "not wanted",
            "tests/.harborignore": "draft.py\n",
            "tests/.dockerignore": "test.sh\n",
            "environment/.gitignore": "*\n",
            "environment/kept": "1",
        }
    )
    files = read_task_files(folder)
    assert files.not_carried == ("tests/draft.py",)
    assert files.not_hashed == ("tests/data.bin",)
    assert "environment/kept" in files.hashed
    carried = select(folder / "tests", task=folder)
    assert set(carried.files) == {"data.bin", "test.sh", ".dockerignore"}
    assert carried.excludes("draft.py") and not carried.excludes("data.bin")
    warnings = load_task(folder, strict=True).warnings
    assert any("1 file(s): tests/draft.py" in w for w in warnings)
    assert any("1 file(s): tests/data.bin" in w for w in warnings)


def test_a_folder_that_is_left_out_takes_all_below_it_along(make_task):
    folder = make_task(files={"tests/.harborignore": "old/\n", "tests/old/deep/x": "1"})
    carried = select(folder / "tests", task=folder)
    assert carried.excludes("old") and carried.excludes("old/deep/x") and not carried.excludes("older")


@pytest.mark.parametrize("name", ["tests/test.sh", "solution/solve.sh"])
def test_what_is_needed_cannot_be_left_out(make_task, name):
    part, script = name.split("/")
    with pytest.raises(TaskError, match="left out"):
        load_task(make_task(files={f"{part}/.harborignore": f"{script}\n"}), strict=False)


@pytest.mark.parametrize("place", ["tests/link", "environment/link", "README.md", "environment/deep/link"])
@pytest.mark.parametrize("target", ["/etc/passwd", "outside"])
def test_a_link_out_of_the_task_is_refused(make_task, tmp_path, place, target):
    (tmp_path / "outside").write_text("host data")
    folder = make_task()
    link = folder / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target if target.startswith("/") else os.path.relpath(tmp_path / target, link.parent))
    with pytest.raises(TaskError, match="outside") as caught:
        read_task_files(folder)
    assert caught.value.cause == "path_escape"


def test_a_folder_of_the_task_cannot_be_a_link_out_of_it(make_task, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = make_task()
    (folder / "environment").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match="outside"):
        read_task_files(folder)


def test_links_within_the_task_are_followed_for_the_digest(make_task):
    folder = make_task(files={"environment/real": "content"})
    (folder / "environment" / "link").symlink_to("real")
    assert read_task_files(folder).digest == harbor_digest(folder, [*BASE, "environment/real", "environment/link"])


@pytest.mark.parametrize("target", [".", "..", "nowhere"])
def test_a_link_to_nowhere_or_in_a_circle_is_refused(make_task, target):
    folder = make_task(files={"environment/a/b": "1"})
    (folder / "environment" / "a" / "link").symlink_to(target)
    with pytest.raises(TaskError):
        read_task_files(folder)


def test_pipes_and_odd_names_are_refused(make_task):
    folder = make_task()
    os.mkfifo(folder / "tests" / "pipe")
    with pytest.raises(TaskError, match="regular"):
        read_task_files(folder)
    (folder / "tests" / "pipe").unlink()
    Path(os.fsdecode(os.fsencode(folder / "tests") + b"/\xff")).write_text("")
    with pytest.raises(TaskError, match="UTF-8"):
        read_task_files(folder)


def test_modes_in_the_vm_do_not_depend_on_the_host(make_task):
    folder = make_task(files={"tests/data": "1", "tests/tool": "1", "tests/sub/x": "1"})
    (folder / "tests" / "tool").chmod(0o700)
    (folder / "tests" / "data").chmod(0o600)
    (folder / "tests" / "test.sh").chmod(0o600)
    meta = select(folder / "tests", task=folder, program="test.sh").meta
    modes = {name: oct(m.mode) for name, m in meta.items()}
    assert modes == {"data": "0o644", "tool": "0o755", "test.sh": "0o755", "sub": "0o755", "sub/x": "0o644"}


@pytest.mark.parametrize(
    ("start", "by_bash"),
    [(b"#!/bin/sh\n", False), (b"\x7fELF\2", False), (b"# canary\n#!/bin/bash\n", True), (b"", True)],
)
def test_a_script_is_started_as_bash_starts_a_file(tmp_path, start, by_bash):
    (tmp_path / "test.sh").write_bytes(start)
    command = script_command("/tests/test.sh", tmp_path / "test.sh")
    assert command == ["/bin/bash", "/tests/test.sh"][not by_bash :]
