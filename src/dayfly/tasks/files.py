"""Which files a task consists of: the content digest, ignore rules, and what is carried into a VM.

Two ignore files, each with one purpose (as in Harbor): `.gitignore` at the task's root decides what the
*digest* covers, `.harborignore` within tests/ and solution/ decides what is *carried* (and hashed).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pathspec import GitIgnoreSpec, PathSpec

from dayfly.errors import TaskError
from dayfly.evidence import sha256_file
from dayfly.model import EntryMeta

SINGLE_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
FOLDERS = ("environment", "tests", "solution", "steps")
IGNORE_NAME = ".harborignore"
DEFAULT_IGNORES = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
"""What the digest leaves out when a task has no .gitignore."""

_IGNORE_SCOPES = GitIgnoreSpec.from_lines(("/tests/", "/solution/", "/steps/*/tests/", "/steps/*/solution/"))


@dataclass(frozen=True)
class TaskFiles:
    """A task folder's files, hashed."""

    digest: str
    """sha256:…, equal to Harbor's content hash."""
    hashed: tuple[str, ...]
    not_carried: tuple[str, ...]
    """Files of tests/ and solution/ that a .harborignore leaves out."""
    not_hashed: tuple[str, ...]
    """Files that are carried into a VM although .gitignore (or its default) hides them from the digest."""


def read_task_files(folder: Path) -> TaskFiles:
    """Walk and hash a task folder.

    Raises `TaskError` for a link that leaves the folder, a link cycle, a file that is not regular, or a
    name that is not UTF-8.
    """
    root = folder.resolve()
    rules = CarryRules(root)
    listing = _Listing()
    for name in SINGLE_FILES:
        path = root / name
        if path.exists() or path.is_symlink():
            _check(path, root)
            listing.files.append(path)
    for name in FOLDERS:
        if (root / name).is_dir():
            _walk(root / name, root, rules, listing)
    spec = _hash_rules(root)
    names = sorted((path.relative_to(root).as_posix(), path) for path in listing.files)
    outer = hashlib.sha256()
    hashed, not_hashed = [], []
    for name, path in names:
        if spec.match_file(name):
            not_hashed.append(name)
            continue
        hashed.append(name)
        outer.update(f"{name}\0{_sha256(path)}\n".encode())
    return TaskFiles(
        digest="sha256:" + outer.hexdigest(),
        hashed=tuple(hashed),
        not_carried=tuple(sorted(listing.left_out)),
        not_hashed=tuple(not_hashed),
    )


@dataclass
class _Listing:
    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _walk(folder: Path, root: Path, rules: CarryRules, listing: _Listing) -> None:
    _check(folder, root)
    for path in sorted(folder.iterdir()):
        if rules.excludes(path):
            if path.name != IGNORE_NAME:
                listing.left_out.append(path.relative_to(root).as_posix() + ("/" if path.is_dir() else ""))
            continue
        _check(path, root)
        if path.is_dir():
            if not path.is_symlink():
                _walk(path, root, rules, listing)
        else:
            listing.files.append(path)


def _check(path: Path, root: Path) -> None:
    """Refuse whatever is not a regular file or folder within the task."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise TaskError(f"the file name {os.fsencode(path)!r} is not UTF-8", hint="rename the file") from None
    try:
        target = path.resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as e:
        raise TaskError(f"{path} cannot be read: {e}", hint="links must point to a file in the task") from e
    if not target.is_relative_to(root):
        raise TaskError(
            f"{path} points outside of the task folder, to {target}",
            hint="put the file into the task; a task is complete in its folder",
            cause="path_escape",
        )
    if path.is_symlink() and path.parent.resolve().is_relative_to(target):
        raise TaskError(f"{path} points to a folder that it lies in", hint="remove the link", cause="path_escape")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TaskError(f"{path} is neither a regular file nor a folder", hint="remove it from the task")


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path.resolve()).removeprefix("sha256:")
    except OSError as e:
        raise TaskError(f"{path} cannot be read: {e.strerror}") from e


def _hash_rules(root: Path) -> PathSpec:  # type: ignore[type-arg]  # generic only since pathspec 1.0
    path = root / ".gitignore"
    if not path.exists():
        return _spec(DEFAULT_IGNORES)
    _check(path, root)
    return _spec(tuple(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()))


@lru_cache(maxsize=64)
def _spec(lines: tuple[str, ...]) -> PathSpec:  # type: ignore[type-arg]
    # Not GitIgnoreSpec: Harbor's packager uses the plain one, and the digests must be equal.
    return PathSpec.from_lines("gitignore", lines)


class CarryRules:
    """What `.harborignore` files leave out of tests/ and solution/; nearer files win, as with git."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._specs: dict[Path, GitIgnoreSpec | None] = {}

    def excludes(self, path: Path) -> bool:
        """Whether `path` (absolute, below the task) is left out; a link also by where it points."""
        if self._matches(path):
            return True
        if not path.is_symlink():
            return False
        target = path.resolve()
        return target.is_relative_to(self.root) and target != self.root and self._matches(target)

    def _matches(self, path: Path) -> bool:
        relative = path.relative_to(self.root)
        if relative.name == IGNORE_NAME:
            return True
        if not _in_scope(relative.as_posix() + ("/" if path.is_dir() else "")):
            return False
        specs: list[tuple[Path, GitIgnoreSpec]] = []
        candidate = self.root
        for part in relative.parts:
            if candidate != self.root and _in_scope(candidate.relative_to(self.root).as_posix() + "/"):
                spec = self._spec_for(candidate)
                if spec is not None:
                    specs.append((candidate, spec))
            candidate = candidate / part
            if specs and self._ignored(candidate, specs, is_dir=candidate != path or path.is_dir()):
                return True
        return False

    @staticmethod
    def _ignored(candidate: Path, specs: list[tuple[Path, GitIgnoreSpec]], *, is_dir: bool) -> bool:
        ignored = False
        for folder, spec in specs:
            found = spec.check_file(candidate.relative_to(folder).as_posix() + ("/" if is_dir else ""))
            if found.include is not None:
                ignored = found.include
        return ignored

    def _spec_for(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            path = folder / IGNORE_NAME
            if path.exists() or path.is_symlink():
                _check(path, self.root)
                lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
                self._specs[folder] = GitIgnoreSpec.from_lines(lines)
            else:
                self._specs[folder] = None
        return self._specs[folder]


def script_command(path: str, script: Path) -> list[str]:
    """How the task's `script`, a host file, is started where it lies in the VM: as bash starts a file.

    That is directly, and by bash itself where the first line names no interpreter: many tasks have a canary
    comment above it, and Harbor starts scripts from a bash.
    """
    with script.open("rb") as file:
        start = file.read(4)
    return [path] if start.startswith(b"#!") or start == b"\x7fELF" else ["/bin/bash", path]


def _in_scope(name: str) -> bool:
    return bool(_IGNORE_SCOPES.match_file(name))


@dataclass(frozen=True)
class Selection:
    """What of a host folder (or file) is carried, and how it shall look in the VM."""

    source: Path
    files: dict[str, str]
    """Relative name ("" for a single file) → sha256 of the content, hex; for a link: `link:` and its target."""
    meta: dict[str, EntryMeta]
    """Modes that do not depend on the host's umask: 0755 for folders and programs, else 0644; owner root."""
    excluded: frozenset[str]

    def excludes(self, name: str) -> bool:
        """For `Vm.put`: true for a left-out name and whatever lies below one."""
        parts = name.rstrip("/").split("/")
        return any("/".join(parts[:n]) in self.excluded for n in range(1, len(parts) + 1))

    @property
    def digest(self) -> str:
        """sha256:… over names and contents."""
        return digest_of_files(self.files)


def digest_of_files(files: Mapping[str, str]) -> str:
    """sha256:… over the names and contents of a `Selection.files`."""
    outer = hashlib.sha256()
    for name in sorted(files):
        outer.update(f"{name}\0{files[name]}\n".encode("utf-8", "surrogateescape"))
    return "sha256:" + outer.hexdigest()


def select(source: Path, *, task: Path | None = None, program: str | None = None) -> Selection:
    """List and hash what of `source` goes into a VM.

    `task` is the task folder whose .harborignore rules apply; `program` is the name of a file that is made
    executable (Harbor's `chmod +x`). Raises `TaskError` when a file cannot be read.
    """
    rules = CarryRules(task) if task is not None else None
    if not source.is_dir():
        return Selection(source, {"": _sha256(source)}, {"": _meta(source, program == source.name)}, frozenset())
    root = source.resolve()
    files: dict[str, str] = {}
    meta: dict[str, EntryMeta] = {}
    excluded: set[str] = set()
    waiting = [root]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(root).as_posix()
            if rules is not None and rules.excludes(path):
                excluded.add(name)
            elif path.is_symlink():
                files[name] = "link:" + str(path.readlink())
            else:
                meta[name] = _meta(path, name == program)
                if path.is_dir():
                    waiting.append(path)
                else:
                    files[name] = _sha256(path)
    return Selection(root, files, meta, frozenset(excluded))


def _meta(path: Path, program: bool) -> EntryMeta:
    mode = path.stat().st_mode
    executable = program or stat.S_ISDIR(mode) or bool(mode & 0o111)
    return EntryMeta(mode=0o755 if executable else 0o644)
