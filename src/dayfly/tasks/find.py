"""From paths that people write to task folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dayfly.errors import NotFoundError, TaskError
from dayfly.tasks.dataset import split_dataset, tasks_of_dataset


def find_tasks(paths: Iterable[Path]) -> list[Path]:
    """The task folders that `paths` name, each once, in order.

    A path is a task, a folder of tasks, or a data set (`registry.json#NAME@VERSION`, `dataset.toml`).
    Raises `NotFoundError` for a path that is not there, `TaskError` for one without a task; for data sets see
    `dataset.py`.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for folder in _tasks_at(path):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _tasks_at(path: Path) -> list[Path]:
    if path.name == "task.toml" and path.is_file():
        path = path.parent
    dataset = split_dataset(path)
    if dataset is not None:
        return tasks_of_dataset(*dataset)
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such folder", hint="give a task folder, or a folder of task folders")
    if _is_task(path):
        return [path]
    below = [p for p in sorted(path.iterdir()) if not p.name.startswith(".") and _is_task(p)]
    if not below:
        raise TaskError(
            f"{path} holds no task",
            hint="a task is a folder with a task.toml; `dayfly init` makes a first one",
        )
    return below


def _is_task(path: Path) -> bool:
    return path.is_dir() and (path / "task.toml").exists()
