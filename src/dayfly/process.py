"""The one door to processes on the host.

Arguments are always a list, never a shell line; every call has a bound; a child that is not waited for
does not exist. `subprocess` and its relatives are banned elsewhere by lint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread

from dayfly.errors import HostError

Fileno = int | IO[bytes] | None
Arg = str | bytes | Path

PIPE = subprocess.PIPE
DEVNULL = subprocess.DEVNULL


@dataclass(frozen=True)
class Completed:
    argv: tuple[Arg, ...]
    returncode: int
    stdout: bytes
    stderr: bytes


def which(name: str, hint: str) -> Path:
    """The full path of a program, or `HostError` with `hint` (how to install it)."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise HostError(f"the program {name!r} is not installed", hint=hint, cause="missing_program")
    return Path(found)


def run(
    argv: Sequence[Arg],
    *,
    timeout_s: float,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    pass_fds: Sequence[int] = (),
    stdin: Fileno = None,
    stdout: Fileno = None,
) -> Completed:
    """Run a program to its end; its output is kept unless `stdout` names a file.

    Raises `HostError` when it cannot start, does not end within `timeout_s` (it is killed then, with its
    process group), or, with `check`, ends with a non-zero status.
    """
    popen = spawn(
        argv,
        pass_fds=pass_fds,
        stdin=PIPE if input is not None else (DEVNULL if stdin is None else stdin),
        stdout=PIPE if stdout is None else stdout,
        stderr=PIPE,
        env=env,
        cwd=cwd,
        new_session=True,
    )
    try:
        out, err = popen.communicate(input, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(popen)
        out, err = popen.communicate()
        raise HostError(
            f"{_shown(argv)} did not end within {timeout_s:g} s",
            hint=_last_lines(err or out),
            cause="host_timeout",
        ) from None
    except BaseException:
        kill_group(popen)
        popen.communicate()
        raise
    if check and popen.returncode != 0:
        raise HostError(
            f"{_shown(argv)} ended with status {popen.returncode}",
            hint=_last_lines(err or out or b""),
            cause="host_program",
        )
    return Completed(tuple(argv), popen.returncode, out or b"", err or b"")


async def run_async(
    argv: Sequence[Arg],
    *,
    timeout_s: float,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    pass_fds: Sequence[int] = (),
    stdin: Fileno = None,
    stdout: Fileno = None,
) -> Completed:
    """`run` in a thread; a cancelled caller waits until the bounded program has ended."""
    return await anyio.to_thread.run_sync(
        lambda: run(
            argv,
            timeout_s=timeout_s,
            input=input,
            env=env,
            cwd=cwd,
            check=check,
            pass_fds=pass_fds,
            stdin=stdin,
            stdout=stdout,
        )
    )


def spawn(
    argv: Sequence[Arg],
    *,
    pass_fds: Sequence[int] = (),
    stdin: Fileno = DEVNULL,
    stdout: Fileno = DEVNULL,
    stderr: Fileno = DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    new_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a program; the caller owns it and must see it gone (`wait_gone`)."""
    try:
        return subprocess.Popen(
            [os.fsencode(a) for a in argv],
            pass_fds=tuple(pass_fds),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=new_session,
        )
    except FileNotFoundError as e:
        raise HostError(
            f"the program {os.fsdecode(argv[0])!r} cannot be started: not found",
            hint="run `dayfly doctor` to see what is missing",
            cause="missing_program",
        ) from e
    except OSError as e:
        raise HostError(f"{_shown(argv)} cannot be started: {e.strerror}", cause="host_program") from e


def kill_group(popen: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process group that `spawn` made; gone already is fine."""
    try:
        os.killpg(popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        popen.kill()


async def wait_gone(popen: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait until the process is reaped. Raises `HostError` when it is still there after `timeout_s`."""
    with anyio.move_on_after(timeout_s):
        pause = 0.001
        while popen.poll() is None:
            await anyio.sleep(pause)
            pause = min(pause * 1.5, 0.05)
    status = popen.poll()
    if status is None:
        raise HostError(
            f"process {popen.pid} is still there after {timeout_s:g} s",
            hint="it may hang in the kernel; look at /proc/PID/stack",
            cause="not_gone",
        )
    return status


def _shown(argv: Sequence[Arg]) -> str:
    words = [os.fsdecode(a) for a in argv]
    line = " ".join(words)
    return line if len(line) <= 160 else line[:157] + "..."


def _last_lines(output: bytes, lines: int = 5) -> str | None:
    text = output.decode("utf-8", "replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or None
