"""What docs/tasks.md shows is what dayfly reads."""

from __future__ import annotations

import re
from pathlib import Path

from dayfly.tasks import TaskFile, load_task

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


def test_the_documented_task_toml_is_read_without_a_remark(make_task):
    toml = re.search(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert toml is not None
    task = load_task(make_task(toml[1]), strict=True)
    assert task.warnings == () and task.name == "acme/report" and task.verifier_command is not None


def test_every_key_of_our_own_table_is_documented():
    table = TaskFile.model_json_schema()["$defs"]["DayflyTable"]["properties"]
    assert all(f"\n{key} = " in DOCS.read_text() for key in table)
