"""A build's context: which files of a folder go to the builder by the rules of `.dockerignore`; their digest."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from dayfly.errors import ImageError
from dayfly.model import EntryMeta

MAX_ENTRIES = 200_000


@dataclass(frozen=True)
class BuildContext:
    """What of `folder` is sent. Modes do not depend on the host's umask: 0755 or 0644; the owner is root."""

    folder: Path
    digest: str
    """sha256:… over names, kinds, executability and contents."""
    names: frozenset[str]
    meta: dict[str, EntryMeta] = field(default_factory=dict)
    bytes: int = 0

    def leaves_out(self, name: str) -> bool:
        """For `Vm.put`."""
        return name.rstrip("/") not in self.names


def read_context(folder: Path, ignore: str) -> BuildContext:
    """List and hash `folder` without what the lines of `ignore` (a .dockerignore) leave out.

    A link is sent as a link, whatever it points to. Raises `ImageError` for pipes, sockets and devices, and for
    files that cannot be read.
    """
    rules = IgnoreRules(ignore)
    outer = hashlib.sha256()
    kept: dict[str, Path] = {}
    try:
        _walk(folder, "", rules, kept)
        meta: dict[str, EntryMeta] = {}
        total = 0
        for name in sorted(kept):
            path = kept[name]
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                outer.update(_record("l", name, os.fsencode(path.readlink())))
                continue
            if stat.S_ISDIR(mode):
                outer.update(_record("d", name, b""))
                meta[name] = EntryMeta(mode=0o755)
                continue
            if not stat.S_ISREG(mode):
                raise ImageError(f"{path} is neither a file, a folder nor a link", hint="list it in .dockerignore")
            meta[name] = EntryMeta(mode=0o755 if mode & 0o111 else 0o644)
            total += path.stat().st_size
            outer.update(_record("x" if mode & 0o111 else "f", name, _sha256(path)))
    except OSError as e:
        raise ImageError(
            f"{e.filename or folder} cannot be read: {e.strerror}", hint="see its owner and mode"
        ) from e
    return BuildContext(folder, "sha256:" + outer.hexdigest(), frozenset(kept), meta, total)


def _walk(folder: Path, prefix: str, rules: IgnoreRules, kept: dict[str, Path]) -> bool:
    """Collect what is kept below `folder`; whether that is anything."""
    found = False
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        name = prefix + entry.name
        ignored = rules.ignores(name)
        if entry.is_dir(follow_symlinks=False):
            inside = _walk(Path(entry.path), name + "/", rules, kept) if not ignored or rules.exceptions else False
            ignored = ignored and not inside
        if ignored:
            continue
        kept[name] = Path(entry.path)
        found = True
        if len(kept) > MAX_ENTRIES:
            raise ImageError(
                f"the build context has more than {MAX_ENTRIES} entries", hint="leave some out with .dockerignore"
            )
    return found


def _record(kind: str, name: str, rest: bytes) -> bytes:
    return f"{kind} {name}\0".encode("utf-8", "surrogateescape") + rest + b"\n"


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()


class IgnoreRules:
    """`.dockerignore`: the last pattern that matches a path, or a folder above it, decides; `!` takes back."""

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.removeprefix("\ufeff").splitlines():
            if line.startswith("#") or not line.strip():
                continue
            pattern = line.strip()
            takes_back = pattern.startswith("!")
            pattern = pattern.removeprefix("!").strip()
            cleaned = os.path.normpath("/" + pattern).lstrip("/")
            if cleaned:
                self._rules.append((not takes_back, _compiled(cleaned)))

    @property
    def exceptions(self) -> bool:
        return any(not ignored for ignored, _ in self._rules)

    def ignores(self, name: str) -> bool:
        parts = name.split("/")
        paths = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        result = False
        for ignored, pattern in self._rules:
            if ignored != result and any(pattern.fullmatch(path) for path in paths):
                result = ignored
        return result


def _compiled(pattern: str) -> re.Pattern[str]:
    """Go's filepath.Match, and `**` for any number of folders."""
    out, at = "", 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest.startswith("**"):
            out, at = out + ".*", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (match := re.match(r"\[(\^?)((?:\\.|[^\]\\])+)\]", rest)):
            inside = re.sub(r"\\(.)", lambda m: re.escape(m[1]), match[2]).replace("[", r"\[")
            out, at = out + f"[{match[1]}{inside}]", at + match.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    try:
        return re.compile(out, re.DOTALL)
    except re.error as e:
        raise ImageError(f"the pattern {pattern!r} of .dockerignore is broken: {e}", hint="see its brackets") from e


def ignore_file(dockerfile: Path, context: Path) -> str:
    """The rules that hold: `<Dockerfile>.dockerignore` beside it, else `.dockerignore` of the context."""
    for path in (dockerfile.with_name(dockerfile.name + ".dockerignore"), context / ".dockerignore"):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="surrogateescape")
    return ""
