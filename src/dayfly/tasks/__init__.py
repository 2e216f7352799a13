"""Task folders in Harbor's layout: finding, reading, hashing. See docs/tasks.md."""

from dayfly.tasks.env import resolve_env
from dayfly.tasks.files import (
    Selection,
    TaskFiles,
    digest_of_files,
    read_task_files,
    script_command,
    select,
)
from dayfly.tasks.find import find_tasks
from dayfly.tasks.judged_by import plain_metadata, verifier_digest
from dayfly.tasks.load import choose_verifier_class, load_task, strip_canary
from dayfly.tasks.schema import TaskFile, task_json_schema
from dayfly.tasks.understood import Field, understood

__all__ = [
    "Field",
    "Selection",
    "TaskFile",
    "TaskFiles",
    "choose_verifier_class",
    "digest_of_files",
    "find_tasks",
    "load_task",
    "plain_metadata",
    "read_task_files",
    "resolve_env",
    "script_command",
    "select",
    "strip_canary",
    "task_json_schema",
    "understood",
    "verifier_digest",
]
