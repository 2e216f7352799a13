"""`rollout.json`: the digests of everything in a rollout's folder, under one seal."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from dayfly.errors import DayflyError, HostError, NotFoundError
from dayfly.evidence.digests import (
    DISK_DIGEST,
    canonical_json,
    readable_json,
    sha256_bytes,
    sha256_file,
    sha256_sparse,
)
from dayfly.evidence.durable import host_errors, read_json, sync_tree, write_durable
from dayfly.evidence.rollout_folder import RECORD_NAME
from dayfly.model import RolloutRecord

_ODD = re.compile("[%\udc80-\udcff\x00-\x1f\x7f]")

SPARSE_FROM = 16 << 20
"""Bytes from which a file with holes gets the digest of sparse files."""


@dataclass(frozen=True)
class Problem:
    """One way in which a folder differs from its record."""

    kind: Literal["missing", "changed", "extra", "seal", "record"]
    path: str
    message: str


def seal(record: RolloutRecord, folder: Path) -> RolloutRecord:
    """Fill in `files` and `seal`, and write `rollout.json`, after everything else is durable.

    A regular file is recorded by its digest, a link as `link:` with its target, anything else by its kind;
    see `path_text` for names that are not UTF-8. Raises `HostError`.
    """
    with host_errors(f"sealing {folder}"):
        sync_tree(folder)
        files = {path_text(name): _digest(folder, name) for name in _walk(folder)}
    filled = record.model_copy(update={"files": files, "seal": ""})
    # Through JSON and back, so that the seal is over exactly what a reader will load.
    plain = RolloutRecord.model_validate(_finite(filled.model_dump(mode="json")))
    sealed = plain.model_copy(update={"seal": seal_of(plain)})
    write_durable(folder / RECORD_NAME, readable_json(sealed))
    return sealed


def seal_of(record: RolloutRecord) -> str:
    """sha256:… over the canonical JSON of the record with an empty seal."""
    return sha256_bytes(canonical_json(record.model_copy(update={"seal": ""})))


def _seal_as_written(folder: Path) -> str:
    """The same over the file's own fields: an older dayfly sealed a record that had fewer of them."""
    return sha256_bytes(canonical_json({**read_json(folder / RECORD_NAME), "seal": ""}))


def _finite(value: Any) -> Any:
    """Free-form details may hold NaN, which JSON has not; it is kept as text. Rewards are finite by type."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def path_text(name: str) -> str:
    """A file name as text for a record: bytes that are not UTF-8 as `%XX`, and `%` as `%25`.

    Surrogate escapes would not do here: pydantic replaces them in the keys of a table.
    """
    if "%" not in name and name.isprintable():
        return name
    return _ODD.sub(lambda m: f"%{ord(m[0]) & 0xFF:02X}", name)


def _walk(folder: Path, prefix: str = "") -> Iterator[str]:
    """Relative paths of everything but folders and the record itself, sorted."""
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda e: e.name)
    for entry in listed:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), name + "/")
        elif name != RECORD_NAME:
            yield name


def _digest(folder: Path, name: str, known: str | None = None) -> str:
    """`known` is the recorded digest, which decides the method: a copy may have lost its holes."""
    path = folder / name
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return "link:" + path_text(os.readlink(path))  # noqa: PTH115 - Path would tidy it up
    if not stat.S_ISREG(info.st_mode):
        return "other:" + stat.filemode(info.st_mode)[0]
    if known is None:
        sparse = info.st_size >= SPARSE_FROM and info.st_blocks * 512 < info.st_size
    else:
        sparse = known.startswith(DISK_DIGEST)
    return sha256_sparse(path) if sparse else sha256_file(path)


def load_record(folder: Path) -> RolloutRecord:
    """The record of a published folder; digests are not checked (see `verify_folder`).

    Raises `NotFoundError` when there is none, `HostError` (cause `broken_record`) naming the file when it is
    not one.
    """
    path = folder / RECORD_NAME
    data = read_json(path)
    try:
        return RolloutRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        newer = isinstance(data, dict) and data.get("schema_version") not in (1, None)
        raise HostError(
            f"{path} is not a rollout record: {where}: {first['msg']}",
            hint="it was written by a newer dayfly; upgrade this one"
            if newer
            else "the file was changed or damaged; move its folder away and resume the job",
            cause="broken_record",
        ) from error


def load_sealed(folder: Path) -> RolloutRecord:
    """As `load_record`, and `HostError` (cause `broken_seal`) when the record is not as it was sealed."""
    record = load_record(folder)
    if record.seal != _seal_as_written(folder):
        raise HostError(
            f"{folder / RECORD_NAME} is not as it was sealed",
            hint="the file was changed or damaged; `dayfly show --verify` lists what differs",
            cause="broken_seal",
        )
    return record


def verify_folder(folder: Path) -> list[Problem]:
    """Everything in which a published folder differs from its record; empty means intact."""
    try:
        record = load_record(folder)
    except (HostError, NotFoundError) as error:
        return [Problem("record", RECORD_NAME, error.message)]
    problems = []
    if record.seal != _seal_as_written(folder):
        problems.append(Problem("seal", RECORD_NAME, "the record was changed after it was sealed"))
    try:
        there = {path_text(name): name for name in _walk(folder)}
    except OSError as error:
        return [*problems, Problem("changed", str(error.filename), f"cannot be read: {error.strerror}")]
    for name in sorted(record.files.keys() - there.keys()):
        problems.append(Problem("missing", name, "the record names it, and it is not there"))
    for name in sorted(there.keys() - record.files.keys()):
        problems.append(Problem("extra", name, "it is there, and the record does not name it"))
    for name in sorted(there.keys() & record.files.keys()):
        if changed := _compare(folder, there[name], record.files[name]):
            problems.append(changed)
    return problems


def _compare(folder: Path, name: str, recorded: str) -> Problem | None:
    try:
        found = _digest(folder, name, recorded)
    except OSError as error:
        return Problem("changed", path_text(name), f"cannot be read: {error.strerror}")
    if found == recorded:
        return None
    return Problem("changed", path_text(name), f"recorded as {recorded[:30]}, found {found[:30]}")


def is_intact(folder: Path) -> bool:
    """Whether a folder was sealed and is unchanged."""
    try:
        return not verify_folder(folder)
    except DayflyError:
        return False
