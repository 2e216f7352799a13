"""`dayfly shell`: look around in a fresh VM on the final disk of a rollout."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Rollout, find, find_rollout, label
from dayfly.cli.output import say
from dayfly.errors import ConfigError, NotFoundError
from dayfly.evidence import DISK_NAME, new_rollout_id
from dayfly.model import Disk, ExecResult, Task
from dayfly.protocols import Sink, StartOptions
from dayfly.registry import HypervisorSettings, make_hypervisor


def register(app: typer.Typer) -> None:
    app.command()(shell)


def shell(
    what: Annotated[str, typer.Argument(metavar="JOB/ROLLOUT")],
    command: Annotated[
        list[str] | None, typer.Argument(help="A command instead of a shell; put -- before it.")
    ] = None,
    user: Annotated[str, typer.Option(help="User in the VM.")] = "root",
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
) -> None:
    """Open a shell in a fresh VM on a copy of the final disk of a rollout; the evidence is not touched."""
    job, rest = find(jobs_dir, what)
    rollout = find_rollout(job, rest)
    if rollout.record.isolation == "fake":
        raise ConfigError(f"{what} was made by the fake hypervisor: there is no disk that a VM could start from")
    kept = rollout.place / DISK_NAME
    if not kept.exists():
        raise NotFoundError(
            f"the final disk of {what} was not kept",
            hint="run with --keep-disk always; the default keeps those of rollouts that did not pass",
        )
    from dayfly.tasks import load_task

    locked = job.lock_data()["tasks"].get(rollout.record.task)
    if locked is None:
        raise NotFoundError(f"task {rollout.record.task} was removed from job {job.job_id}; its image is not known")
    task = load_task(Path(locked["path"]), strict=False)
    if task.digest != rollout.record.task_digest:
        say(f"note: the task has changed since; its environment is taken as it is now ({task.digest})")
    result = anyio.run(_open, rollout, task, kept, command or [], user)
    raise typer.Exit(result.exit_code if result.exit_code is not None else 128 + (result.signal or 0))


async def _open(rollout: Rollout, task: Task, kept: Path, command: list[str], user: str) -> ExecResult:
    disk = _disk(rollout.record.image_digest or task.image or "")
    hypervisor = make_hypervisor("qemu", HypervisorSettings())
    with tempfile.TemporaryDirectory(dir=rollout.job.path) as scratch:
        writable = Path(scratch) / "disk.img"
        await anyio.to_thread.run_sync(_copy_sparse, kept, writable)
        options = StartOptions(
            vm_id=f"{new_rollout_id()}-s", writable=writable, hostname="dayfly", workdir=task.workdir
        )
        async with hypervisor.start(disk, rollout.record.machine, options) as vm:
            if command:
                return await vm.exec(command, user=user, stdout=_out(1), stderr=_out(2))
            say(f"final disk of {label(rollout.record)}; leave with exit or Ctrl-D")
            interactive = sys.stdin.isatty()
            with _raw_terminal(interactive):
                return await vm.exec(
                    ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash -i; exec sh -i"],
                    env={"TERM": os.environ.get("TERM", "dumb")},
                    user=user,
                    stdin=_keys(),
                    terminal=_size() if interactive else None,
                    stdout=_out(1),
                    stderr=_out(2),
                )


def _disk(image: str) -> Disk:
    from dayfly.images import ImageStore

    store = ImageStore()
    return store.disk(store.resolve(image))


def _copy_sparse(source: Path, dest: Path) -> None:
    """A copy that keeps holes; the kept disk is evidence and is never written."""
    with source.open("rb") as src, dest.open("wb") as out:
        size = os.fstat(src.fileno()).st_size
        out.truncate(size)
        offset = 0
        while offset < size:
            try:
                start = os.lseek(src.fileno(), offset, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            end = os.lseek(src.fileno(), start, os.SEEK_HOLE)
            src.seek(start)
            out.seek(start)
            while start < end:
                chunk = src.read(min(1 << 20, end - start))
                out.write(chunk)
                start += len(chunk)
            offset = end
    shutil.copymode(source, dest)


def _out(fd: int) -> Sink:
    def write(chunk: bytes) -> None:
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]

    return write


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.lines, size.columns


async def _keys() -> AsyncIterator[bytes]:
    """What is typed, as it is typed."""
    while True:
        await anyio.wait_readable(sys.stdin.fileno())
        chunk = os.read(sys.stdin.fileno(), 4096)
        if not chunk:
            return
        yield chunk


@contextmanager
def _raw_terminal(wanted: bool) -> Iterator[None]:
    """Hand every key to the guest, and give the terminal back as it was."""
    if not wanted:
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
