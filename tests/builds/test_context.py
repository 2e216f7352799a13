"""Which files of a folder are sent to a builder, and when two contexts are the same."""

from __future__ import annotations

import os
import shutil

import pytest

from dayfly.errors import ImageError
from dayfly.images.builder.context import ignore_file, read_context

FILES = ("a.txt", "b.md", "docs/c.md", "docs/deep/d.md", "logs/keep.log", "logs/x.log", "node/e", ".git/config")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "context"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def files(context) -> set[str]:
    return {n for n in context.names if n in FILES}


@pytest.mark.parametrize(
    ("rules", "left_out"),
    [
        ("", set()),
        ("*.md", {"b.md"}),
        ("**/*.md", {"b.md", "docs/c.md", "docs/deep/d.md"}),
        ("**/*.md\n!docs/deep", {"b.md", "docs/c.md"}),
        ("logs/*\n!logs/keep.log", {"logs/x.log"}),
        ("logs\n!logs/keep.log", {"logs/x.log"}),
        ("/node/\n# a comment\n\n.git", {"node/e", ".git/config"}),
        ("docs/?.md", {"docs/c.md"}),
        ("*\n!a.*", set(FILES) - {"a.txt"}),
        ("docs/[a-c].md", {"docs/c.md"}),
        ("./a.txt\nnothing/../b.md", {"a.txt", "b.md"}),
    ],
)
def test_dockerignore_means_what_it_means_to_docker(folder, rules, left_out):
    context = read_context(folder, rules)
    assert files(context) == set(FILES) - left_out
    assert all(context.leaves_out(n) for n in left_out)


def test_the_ignore_file_beside_the_dockerfile_comes_first(folder):
    (folder / ".dockerignore").write_text("a.txt")
    (folder / "other.Dockerfile").write_text("FROM scratch")
    assert ignore_file(folder / "Dockerfile", folder) == "a.txt"
    (folder / "other.Dockerfile.dockerignore").write_text("b.md")
    assert ignore_file(folder / "other.Dockerfile", folder) == "b.md"


def test_the_digest_is_of_names_modes_and_contents_and_of_nothing_else(folder, tmp_path):
    digest = read_context(folder, "").digest
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / "a.txt", (1, 1))
    (copy / "a.txt").chmod(0o640)
    assert read_context(copy, "").digest == digest
    seen = {digest}
    for change in (
        lambda: (copy / "a.txt").write_text("other"),
        lambda: (copy / "a.txt").chmod(0o755),
        lambda: (copy / "b.md").rename(copy / "b2.md"),
        lambda: (copy / "empty").mkdir(),
        lambda: (copy / "link").symlink_to("a.txt"),
    ):
        change()
        seen.add(read_context(copy, "").digest)
    assert len(seen) == 6


def test_a_link_out_of_the_context_is_sent_as_a_link(folder):
    (folder / "out").symlink_to("/etc/passwd")
    context = read_context(folder, "")
    assert "out" in context.names and "out" not in context.meta


def test_a_pipe_is_refused_by_name(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(ImageError, match="pipe is neither"):
        read_context(folder, "")
    assert "pipe" not in read_context(folder, "pipe").names
