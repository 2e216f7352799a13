"""registry.json and dataset.toml as sources of tasks; repositories are local ones, made by the test."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dayfly.errors import HostError, NotFoundError, TaskError
from dayfly.tasks import find_tasks, read_task_files
from dayfly.tasks.dataset import cache_dir, read_dataset_toml

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.example", "GIT_COMMITTER_NAME": "a"}
WHO |= {"GIT_COMMITTER_EMAIL": "a@b.example", "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=WHO, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, make_task: Callable[..., Path]) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    make_task(name="repository/tasks/one")
    make_task(name="repository/tasks/two", files={"instruction.md": "Do the other.\n"})
    (folder / "README.md").write_text("not part of a task\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "tasks")
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Callable[..., Path]:
    def write(*datasets: dict[str, Any]) -> Path:
        path = tmp_path / "registry.json"
        path.write_text(json.dumps([{"description": "", "version": "1.0", **d} for d in datasets]))
        return path

    return write


def from_git(repository: Path, path: str, commit: str | None = None) -> dict[str, Any]:
    at = git(repository, "rev-parse", "HEAD") if commit is None else commit
    return {"name": Path(path).name, "git_url": f"file://{repository}", "git_commit_id": at, "path": path}


# --- registry.json -------------------------------------------------------------------------------


def test_tasks_beside_a_registry(registry, make_task):
    one, two = make_task(name="tasks/one"), make_task(name="tasks/two")
    path = registry(
        {"name": "mine", "tasks": [{"name": "b", "path": "tasks/two"}, {"name": "a", "path": "tasks/one"}]}
    )
    assert find_tasks([Path(f"{path}#mine@1.0")]) == [two, one]
    assert find_tasks([path]) == [two, one], "the only data set need not be named"


def test_which_data_set_and_which_version(registry, make_task):
    for name in ("old", "new", "rc", "head"):
        make_task(name=name)

    def dataset(version: str, task: str, name: str = "mine") -> dict[str, Any]:
        return {"name": name, "version": version, "tasks": [{"name": "t", "path": task}]}

    path = registry(dataset("1.9", "old"), dataset("1.10", "new"), dataset("1.10rc1", "rc"))
    assert [p.name for p in find_tasks([Path(f"{path}#mine")])] == ["new"]
    assert [p.name for p in find_tasks([Path(f"{path}#mine@1.9")])] == ["old"]
    with pytest.raises(NotFoundError, match=r"no version '2'") as refused:
        find_tasks([Path(f"{path}#mine@2")])
    assert "1.10rc1" in str(refused.value)
    path = registry(dataset("1.10", "new"), dataset("head", "head"), dataset("1", "old", name="other"))
    assert [p.name for p in find_tasks([Path(f"{path}#mine")])] == ["head"]
    with pytest.raises(NotFoundError, match="2 data sets"):
        find_tasks([path])
    with pytest.raises(NotFoundError, match="did you mean other"):
        find_tasks([Path(f"{path}#othr")])


def test_tasks_in_a_repository_are_fetched_once_by_commit(registry, repository, tmp_path):
    path = registry({"name": "g", "tasks": [from_git(repository, "tasks/two"), from_git(repository, "tasks/one")]})
    found = find_tasks([path])
    assert [p.name for p in found] == ["two", "one"]
    assert all(p.is_relative_to(cache_dir()) for p in found)
    digests = [read_task_files(p).digest for p in found]
    assert digests == [read_task_files(repository / "tasks" / n).digest for n in ("two", "one")]
    assert not list(found[0].parent.parent.rglob("README.md")), "nothing but the tasks is taken"
    repository.rename(tmp_path / "gone")
    assert find_tasks([path]) == found, "a commit never changes, so nothing is asked for again"


def test_the_named_commit_counts_and_a_branch_is_followed(registry, repository):
    first = git(repository, "rev-parse", "HEAD")
    before = read_task_files(repository / "tasks/one").digest
    (repository / "tasks/one/instruction.md").write_text("Changed.\n")
    git(repository, "commit", "-qam", "change")
    after = read_task_files(repository / "tasks/one").digest
    for commit, expected in ((first, before), ("main", after), ("HEAD", after)):
        (found,) = find_tasks([registry({"name": "g", "tasks": [from_git(repository, "tasks/one", commit)]})])
        assert read_task_files(found).digest == expected


def test_a_commit_that_no_branch_reaches_is_fetched(registry, repository):
    git(repository, "checkout", "-q", "--detach")
    (repository / "tasks/one/instruction.md").write_text("Detached.\n")
    git(repository, "commit", "-qam", "detached")
    task = from_git(repository, "tasks/one")
    git(repository, "checkout", "-q", "main")
    (found,) = find_tasks([registry({"name": "g", "tasks": [task]})])
    assert (found / "instruction.md").read_text() == "Detached.\n"


def test_nothing_of_a_repository_is_started(registry, repository, tmp_path, monkeypatch):
    """A filter that the host's git knows, a submodule, and links: data only."""
    mark = tmp_path / "mark"
    config = tmp_path / "gitconfig"
    config.write_text(f'[filter "lfs"]\n\tsmudge = "touch {mark}; cat"\n\trequired = true\n')
    (repository / ".gitattributes").write_text("*.md filter=lfs\n")
    (repository / ".gitmodules").write_text(f'[submodule "s"]\n\tpath = tasks/one/s\n\turl = {repository}\n')
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "attributes")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(config.read_text())
    (found,) = find_tasks([registry({"name": "g", "tasks": [from_git(repository, "tasks/one")]})])
    assert (found / "instruction.md").exists() and not mark.exists()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"git_url": "ext::sh -c touch% /tmp/x"}, TaskError, "git_url"),
        ({"git_url": "--upload-pack=touch"}, TaskError, "git_url"),
        ({"git_url": "git://example.org/x"}, TaskError, "git_url"),
        ({"git_url": "file:///nonexistent/x"}, HostError, "could not be read"),
        ({"git_commit_id": "0" * 40}, TaskError, "has no commit 000"),
        ({"git_commit_id": "--help"}, TaskError, "no name of a commit"),
        ({"git_commit_id": "no-such-branch"}, TaskError, "no branch or tag"),
        ({"path": "../up"}, TaskError, "without `..`"),
        ({"path": "/etc"}, TaskError, "is relative"),
        ({"path": "tasks/three"}, TaskError, "has no folder tasks/three"),
        ({"path": "tasks/*"}, TaskError, "has no folder"),
        ({"path": "tasks"}, TaskError, "holds no task"),
    ],
)
def test_what_cannot_be_fetched_is_named(registry, repository, changes, error, named):
    path = registry({"name": "g", "tasks": [{**from_git(repository, "tasks/one"), **changes}]})
    with pytest.raises(error) as refused:
        find_tasks([path])
    assert named in refused.value.message
    assert not list(cache_dir().rglob(".making-*"))


def test_pointers_of_git_lfs_are_no_task(registry, repository):
    (repository / "tasks/one/environment").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (repository / "tasks/one/environment/big.bin").write_text(pointer)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "big")
    with pytest.raises(TaskError, match=r"big\.bin is kept in Git LFS"):
        find_tasks([registry({"name": "g", "tasks": [from_git(repository, "tasks/one")]})])


@pytest.mark.parametrize(
    ("text", "named"),
    [("{}", "is not a list"), ("[{}]", "entry 1: name"), ("[", "is not JSON"), ("[[]]", "entry 1")],
)
def test_a_broken_registry_is_named(tmp_path, text, named):
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(TaskError, match=named):
        find_tasks([tmp_path / "registry.json"])
    with pytest.raises(NotFoundError):
        find_tasks([tmp_path / "absent.json"])


# --- dataset.toml --------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    def write(tasks: dict[str, str], files: str = "") -> Path:
        lines = ["[dataset]", 'name = "acme/set"', 'version = "1.0.0"']
        for name, digest in tasks.items():
            lines += ["[[tasks]]", f'name = "{name}"', f'digest = "{digest}"']
        (tmp_path / "dataset.toml").write_text("\n".join(lines) + "\n" + files)
        return tmp_path / "dataset.toml"

    return write


def test_tasks_of_a_data_set_are_found_by_digest_wherever_they_lie(dataset, make_task):
    one, two = make_task(name="one"), make_task(name="tasks/renamed", files={"instruction.md": "Two.\n"})
    digests = [read_task_files(p).digest for p in (one, two)]
    path = dataset({"acme/two": digests[1], "acme/one": digests[0]})
    assert find_tasks([path]) == [two, one]


def test_the_digest_of_a_data_set_is_harbors(dataset):
    a, b = "a" * 64, "b" * 64
    plain = read_dataset_toml(dataset({"acme/x": f"sha256:{b}", "acme/y": f"sha256:{a}"}))
    assert plain.digest == "sha256:" + hashlib.sha256(f"{a},{b}".encode()).hexdigest()
    files = f'[[files]]\npath = "metric.py"\ndigest = "sha256:{b}"\n'
    more = read_dataset_toml(dataset({"acme/x": f"sha256:{a}"}, files))
    assert more.digest == "sha256:" + hashlib.sha256(f"{a};metric.py:{b}".encode()).hexdigest()


def test_a_task_that_differs_or_is_not_there_is_named(dataset, make_task):
    one = make_task(name="one")
    path = dataset({"acme/one": read_task_files(one).digest})
    (one / "instruction.md").write_text("Changed.\n")
    with pytest.raises(TaskError, match="has the digest"):
        find_tasks([path])
    with pytest.raises(TaskError, match=r"acme/two of .* is in no folder beside it"):
        find_tasks([dataset({"acme/two": "sha256:" + "0" * 64})])


def test_files_of_a_data_set_are_compared(dataset, make_task, tmp_path):
    one = make_task(name="one")
    (tmp_path / "metric.py").write_text("print(1)\n")
    right = "sha256:" + hashlib.sha256(b"print(1)\n").hexdigest()
    tasks = {"acme/one": read_task_files(one).digest}
    assert find_tasks([dataset(tasks, f'[[files]]\npath = "metric.py"\ndigest = "{right}"\n')]) == [one]
    (tmp_path / "metric.py").write_text("print(2)\n")
    with pytest.raises(TaskError, match=r"metric\.py is not the file"):
        find_tasks([tmp_path / "dataset.toml"])
    with pytest.raises(TaskError, match="lies beside"):
        find_tasks([dataset(tasks, '[[files]]\npath = "../metric.py"\n')])
    with pytest.raises(TaskError, match=r"tasks\.0\.digest"):
        find_tasks([dataset({"acme/one": "md5:0"})])
