"""Fault 1: what the repository in a task's image gives away of the answer. Real git, here on the host."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import anyio
import pytest

from dayfly.history import (
    MAX_NAMED,
    NotRead,
    fetch_repository,
    find_extras,
    host_git,
    problems_in,
)
from dayfly.protocols import Transfer

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.example", "GIT_COMMITTER_NAME": "a"}
WHO |= {"GIT_COMMITTER_EMAIL": "a@b.example", "PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null"}
EXPIRE = "git reflog expire --expire=now --all; "
FIX = "echo good > f; git commit -qam 'the fix'; "


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], Path]:
    """A repository whose first commit is the base; the script goes on from there."""

    def make(script: str) -> Path:
        folder = tmp_path / "r"
        start = f"git init -q -b main {folder}; cd {folder}; echo bug > f; git add f; git commit -qm base; "
        subprocess.run(["sh", "-ec", start + script], check=True, env=WHO)
        return folder / ".git"

    return make


def extras(place: Path) -> list[str]:
    return [str(e) for e in anyio.run(find_extras, host_git(place), "/app/r")]


@pytest.mark.parametrize(
    ("script", "where"),
    [
        (FIX + "git tag v2; git reset -q --hard HEAD~1; " + EXPIRE, "refs/tags/v2"),
        (FIX + "git tag -a -m x v2; git reset -q --hard HEAD~1; " + EXPIRE, "refs/tags/v2"),
        (FIX + "git branch later; git reset -q --hard HEAD~1; " + EXPIRE, "refs/heads/later"),
        (FIX + "git reset -q --hard HEAD~1", "the reflog"),
        (FIX + "git reset -q --hard HEAD~1; " + EXPIRE, "no reference"),
        (FIX + "git reset -q --hard HEAD~1; git repack -qadk; " + EXPIRE, "no reference"),
        (FIX + "git checkout -q --detach HEAD~1; " + EXPIRE, "refs/heads/main"),
        (FIX + "git reset -q --hard HEAD~1; git update-ref refs/odd/one ORIG_HEAD; " + EXPIRE, "refs/odd/one"),
        (FIX + "git tag v2; git reset -q --hard HEAD~1; git pack-refs --all; " + EXPIRE, "refs/tags/v2"),
    ],
)
def test_a_commit_that_is_no_ancestor_is_named_and_how_it_is_reached(repository, script, where):
    (found,) = extras(repository(script))
    assert found.startswith("/app/r: commit ") and f"'the fix', reached by {where}" in found


@pytest.mark.parametrize(
    "script",
    [
        "",
        FIX,
        FIX + "git tag v1 HEAD~1; git tag -a -m x v2",
        FIX + "git reset -q --hard HEAD~1; " + EXPIRE + "git gc -q --prune=now",
        "echo more > g; git add g",
    ],
    ids=["one commit", "history", "tags of ancestors", "cleaned", "staged"],
)
def test_a_clean_repository_gives_nothing_away(repository, script):
    assert extras(repository(script)) == []


def test_a_stash_and_a_loose_file_count(repository):
    found = extras(repository("echo good > f; git stash -q; echo answer | git hash-object -w --stdin"))
    assert [f.split(" ")[1] for f in found] == ["commit", "commit", "blob"]
    assert "refs/stash" in found[0]
    assert found[2].endswith("reached by no reference")


def test_another_working_tree_does_not_hide_a_commit(repository):
    script = "git worktree add -q --detach ../w; cd ../w; echo good > f; git commit -qam 'the fix'"
    assert any("'the fix'" in f for f in extras(repository(script)))


def test_a_replacement_or_a_graft_does_not_make_the_fix_an_ancestor(repository):
    leak = FIX + "fix=$(git rev-parse HEAD); git reset -q --hard HEAD~1; " + EXPIRE
    place = repository(leak + "git replace --graft HEAD $fix; mkdir -p .git/info; echo x > .git/info/x")
    assert any("'the fix'" in f for f in extras(place))


def test_a_repository_without_a_commit_checked_out(repository):
    place = repository(FIX + "git branch keep; git symbolic-ref HEAD refs/heads/empty")
    found = extras(place)
    assert len(found) == 2 and all("refs/heads/" in f for f in found)


def test_a_broken_repository_is_said_to_be_unread(tmp_path):
    for name in ("objects", "refs"):
        (tmp_path / name).mkdir()
    (tmp_path / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / "packed-refs").write_text("# pack-refs with: \n" + "1" * 40 + " refs/heads/main\n")
    with pytest.raises(NotRead):
        anyio.run(find_extras, host_git(tmp_path), "/app/r")


# --- git of the host on somebody else's files ----------------------------------------------------


class Files:
    """A VM that has files only: `get` copies a host folder."""

    async def get(self, source, dest, *, exclude, limits) -> Transfer:
        for path in sorted(Path(source).rglob("*")):
            name = path.relative_to(source).as_posix()
            if exclude(name):
                continue
            if path.is_dir():
                (dest / name).mkdir(exist_ok=True)
            else:
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                (dest / name).write_bytes(path.read_bytes())
        return Transfer()


def test_nothing_that_a_fetched_repository_brings_is_started(repository, tmp_path):
    """fsmonitor, hooks, a pager, an alternate object store and a signing program, each leaving a mark."""
    mark = tmp_path / "mark"
    place = repository(FIX + "git tag v2; git reset -q --hard HEAD~1; " + EXPIRE)
    started = tmp_path / "started"
    started.write_text(f"#!/bin/sh\ntouch {mark}\n")
    started.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "gpg.program", "core.sshCommand", "include.path"):
        subprocess.run(["git", "--git-dir", place, "config", key, f"!{started}"], check=True, env=WHO)
    subprocess.run(
        ["git", "--git-dir", place, "config", "include.path", str(tmp_path / "more")], check=True, env=WHO
    )
    for hook in ("reference-transaction", "post-index-change", "pre-auto-gc"):
        (place / "hooks" / hook).write_text(started.read_text())
        (place / "hooks" / hook).chmod(0o755)
    (place / "objects/info/alternates").write_text(f"{tmp_path}/elsewhere/objects\n")

    async def main() -> list[str]:
        git = await fetch_repository(Files(), str(place), tmp_path / "copy")
        return [str(e) for e in await find_extras(git, "/app/r")]

    (found,) = anyio.run(main)
    assert "'the fix'" in found and not mark.exists()
    kept = {p.relative_to(tmp_path / "copy").as_posix() for p in (tmp_path / "copy").rglob("*")}
    assert not {"hooks", "info", "objects/info"} & kept
    assert "fsmonitor" not in (tmp_path / "copy/config").read_text()


def test_gits_sandbox_sees_nothing_else_of_the_host(repository, tmp_path):
    place = repository("")
    secret = tmp_path / "secret"
    secret.write_text("text")
    answer = anyio.run(host_git(place), ("hash-object", "--no-filters", str(secret)), b"")
    assert answer.code != 0 and answer.out == b""


def test_what_git_prints_is_bounded_where_it_is_written(repository):
    place = repository("head -c 20000000 /dev/zero >big; git add big; git commit -qm big")
    with pytest.raises(NotRead, match="printed too much"):
        anyio.run(host_git(place), ("cat-file", "blob", "HEAD:big"), b"")


def test_many_findings_become_a_few_lines(repository):
    script = "for n in $(seq 30); do echo $n > f; git commit -qam c$n; done; git tag t; git reset -q --hard HEAD~30"
    place = repository(script)
    found = anyio.run(find_extras, host_git(place), "/app/r")
    assert len(found) == 30
    data = json.dumps({"extras": [asdict(e) for e in found], "unread": ["/x was not looked at"]}).encode()
    problems, remarks = problems_in(data)
    assert len(problems) == MAX_NAMED + 1 and "10 more" in problems[-1]
    assert remarks == ["/x was not looked at"]
