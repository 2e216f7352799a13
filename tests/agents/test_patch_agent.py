"""The agent whose work is a patch for each task."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from dayfly.agents import agent_digest
from dayfly.errors import AgentError, ConfigError
from dayfly.model import AgentSpec, Task
from dayfly.protocols import AgentResult
from dayfly.registry import make_agent


def patch_agent(folder: Path):
    return make_agent(AgentSpec(name="m", kind="patch", options={"folder": folder.name}), folder.parent)


def run(folder: Path, name: str) -> AgentResult:
    task = Task(name=name, digest="", path=folder, instruction="", image=None)
    return anyio.run(patch_agent(folder).run, None, task, None, 10.0)


def test_a_task_without_a_patch_is_the_agents_fault_and_an_empty_one_changes_nothing(tmp_path):
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "acme__one.patch").write_text(" \n")
    assert run(folder, "acme/one").exit_code == 0
    with pytest.raises(AgentError, match="no patch for task other"):
        run(folder, "other")
    with pytest.raises(ConfigError, match="does not exist"):
        patch_agent(tmp_path / "elsewhere")


def test_the_patches_make_the_agents_version(tmp_path):
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "a.patch").write_text("x")
    spec = AgentSpec(name="m", kind="patch", options={"folder": "patches"})
    first = agent_digest(spec, tmp_path)
    folder.rename(tmp_path / "moved")
    moved = spec.model_copy(update={"options": {"folder": "moved"}})
    assert agent_digest(moved, tmp_path) == first, "the place is no part of it"
    (tmp_path / "moved/a.patch").write_text("y")
    assert agent_digest(moved, tmp_path) != first
