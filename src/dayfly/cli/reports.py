"""Files that a command writes for people and programs: readable by whom the umask says, where the person points."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from dayfly.errors import UsageError
from dayfly.evidence.durable import host_errors, write_all


def refuse_dash(option: str, path: Path | None) -> None:
    """Raise `UsageError` for `-`, of which most programs would expect standard output."""
    if path == Path("-"):
        raise UsageError(f"{option} - would be a file called `-`", hint=f"name a file: {option} FILE")


def write_report(path: Path, data: bytes) -> None:
    """Replace `path`, durably and whole; missing folders are made.

    What is there keeps its mode, a link is followed, and what is no file (a pipe, `/dev/null`) is written to. The
    file in which GitHub collects what the steps of a job say is added to. Raises `HostError`.
    """
    with host_errors(f"writing {path}"):
        real = Path(os.path.realpath(path))
        if os.environ.get("GITHUB_STEP_SUMMARY") == str(path) or (real.exists() and not real.is_file()):
            with real.open("ab", buffering=0) as file:
                write_all(file.fileno(), data)
            return
        real.parent.mkdir(parents=True, exist_ok=True)
        _replace(real, data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb", buffering=0) as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            write_all(file.fileno(), data)
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
