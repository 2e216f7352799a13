"""Which tests fetch something while they judge: where that fails, a careless script gives everybody a 0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FETCH = re.compile(
    r"(?<![\w./-])(?:"
    r"(?P<tool>curl|wget|uvx|npx|bunx|pipx)\s"
    r"|(?P<install>(?:python3?\s+-m\s+)?pip3?\s+(?:install|download)|uv\s+(?:pip\s+install|sync|tool|add)"
    r"|apt(?:-get)?\s+(?:-\S+\s+)*(?:update|install)|apk\s+(?:-\S+\s+)*add|(?:dnf|yum)\s+(?:-\S+\s+)*install"
    r"|(?:npm|pnpm|yarn)\s+(?:i|ci|add|install)|git\s+(?:clone|fetch|pull)|cargo\s+install|go\s+(?:install|get)"
    r"|gem\s+install|conda\s+install))"
)
_HERE = re.compile(r"localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0|file://|--no-index|--offline")
MAX_SCRIPT_BYTES = 1 << 20
JOINT = "\v"
"""Stands for the end of a line that goes on in the next: white space that no script has."""


def downloads_in_tests(folder: Path) -> list[str]:
    """One remark for each line of a task's test scripts that looks as if it fetched something from a network."""
    return [remark for script in _scripts(folder) for remark in _remarks(script, folder)]


def _scripts(folder: Path) -> list[Path]:
    found = [p for pattern in ("tests/**/*.sh", "steps/*/tests/**/*.sh") for p in folder.glob(pattern)]
    return sorted(p for p in found if p.is_file() and p.stat().st_size <= MAX_SCRIPT_BYTES)


def _remarks(script: Path, folder: Path) -> Iterator[str]:
    text = script.read_text(encoding="utf-8", errors="replace").replace("\\\n", JOINT)
    number = 1
    for line in text.split("\n"):
        code = re.sub(r"(?:^|\s)#.*", "", line)
        found = _FETCH.search(code)
        if found is not None and not _HERE.search(code):
            yield (
                f"{script.relative_to(folder).as_posix()}:{number} fetches from a network "
                f"({' '.join(found[0].split())}): "
                "a mirror that fails there looks like work that fails; put it into the image"
            )
        number += 1 + line.count(JOINT)
