"""A task folder made whole, checked, and only then moved into its place."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayfly.errors import ConfigError, TaskError
from dayfly.tasks import load_task


@dataclass(frozen=True)
class Imported:
    """A task that was carried over."""

    name: str
    path: Path
    remarks: tuple[str, ...] = ()
    """What the reader should know: what `load_task` remarks, and what differs from the original."""


@contextmanager
def new_task(dest: Path, source: str, *, force: bool, remarks: list[str]) -> Iterator[Path]:
    """A folder to fill; when that is done it is loaded as a task and becomes `dest`.

    Raises `ConfigError` when `dest` exists without `force`, and `TaskError`, naming `source`, when what was made
    cannot be run. Then nothing is left behind, and an earlier `dest` stays.
    """
    if dest.exists() and not force:
        raise ConfigError(f"{dest} exists", hint="--force replaces it; or name another folder with --to")
    dest.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".importing-", dir=dest.parent))
    folder = making / dest.name
    folder.mkdir()
    try:
        yield folder
        remarks += _checked(folder, source)
        if dest.exists():
            dest.rename(making / "replaced")
        folder.rename(dest)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _checked(folder: Path, source: str) -> tuple[str, ...]:
    try:
        return load_task(folder, strict=True).warnings
    except TaskError as error:
        message = error.message.replace(str(folder.resolve()), source)
        raise TaskError(message, hint=error.hint, cause=error.cause) from error


def write_program(path: Path, text: str) -> None:
    """A script that can be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


# --- TOML ----------------------------------------------------------------------------------------

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(data: Mapping[str, Any]) -> str:
    """Tables of texts, numbers, booleans, lists and tables as TOML; None is left out. Lists of tables work, too."""
    return "\n".join(_table(data, ())).strip() + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping) or _is_tables(v)}
    for key, value in data.items():
        if value is not None and key not in tables:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        name = ".".join(map(_key, (*path, key)))
        for one in [value] if isinstance(value, Mapping) else value:
            yield f"\n[{name}]" if isinstance(value, Mapping) else f"\n[[{name}]]"
            yield from _table(one, (*path, key))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # A TOML text is a JSON one, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value if v is not None) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    return _text(str(value))
