"""The seams: everything that varies sits behind one of these small protocols."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from anyio.abc import ByteStream

from dayfly.model import (
    Change,
    Disk,
    EntryMeta,
    ExecResult,
    GuestStats,
    Isolation,
    Machine,
    RolloutRecord,
    RolloutSpec,
    Space,
    Task,
    Transfer,
    Verdict,
    VmInfo,
)

Sink = Callable[[bytes], None]
"""Takes each chunk of a stream as it arrives. Must not block for long."""

PathLike = str | bytes
"""A path in the guest. Names are bytes; a str is encoded as UTF-8 with surrogate escapes."""


@dataclass(frozen=True)
class TransferLimits:
    """Caps on what comes out of a guest; over one of them the transfer fails with `LimitError`."""

    files: int = 200_000
    bytes: int = 2 * 1024**3
    file_bytes: int = 2 * 1024**3
    depth: int = 64


class Vm(Protocol):
    """One running microVM, used for one rollout (or one verification) and then gone.

    A guest has two *spaces*. `work` is where the agent works: the image with a writable layer, its own
    pid and mount namespace, its own cgroup. `verify` exists only after `open_verifier_space`: it sees the
    same files and processes, but the folders named there are new, empty, and invisible to every process of
    `work`. Every call raises `GuestLost` when the guest stops answering, `SandboxOom` when that was for
    want of memory, and `GuestRefused` (or `LimitError`) when the guest declines one request.
    """

    @property
    def info(self) -> VmInfo: ...

    async def exec(
        self,
        argv: Sequence[PathLike],
        *,
        env: Mapping[str, str] | None = None,
        cwd: PathLike | None = None,
        user: str | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        terminal: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
        space: Space = "work",
        leave_children: bool = True,
    ) -> ExecResult:
        """Run a program and wait for its *main process* to end (not for the end of its output).

        `env` is added to the VM's environment (image, then task); `cwd` defaults to the image's or task's
        working directory; `user` to the image's user. `timeout_s` counts in the guest; at the deadline the
        whole tree is killed by cgroup, its absence is checked, and the result has `timed_out` and all output
        so far. `stdout` and `stderr` see every byte; the result keeps the first and last 64 KiB of each.
        `leave_children`: whether processes that outlive the main process stay. `terminal` (rows, columns)
        gives the program a terminal of its own; its output is then one stream, on `stdout`.

        Raises `LimitError` before anything starts when an argument or environment value is too long, and
        `GuestRefused` when the program cannot be started (not found, not executable, unknown user).
        """
        ...

    async def put(
        self,
        source: Path | bytes,
        dest: PathLike,
        *,
        mode: int | None = None,
        user: str | None = None,
        exclude: Callable[[str], bool] | None = None,
        space: Space = "work",
        meta: Mapping[str, EntryMeta] | None = None,
    ) -> Transfer:
        """Copy a host file or folder (its contents), or bytes as one file, to `dest` in the guest.

        Parents are made. A folder is merged into an existing one. Owner is `user`, else root. `mode`
        applies to a single file. Sparse files stay sparse. The guest's digest is compared with ours.
        `meta` (as a `get` returned it) restores mode and owner of what came out of a guest before.
        """
        ...

    async def get(
        self,
        source: PathLike,
        dest: Path,
        *,
        exclude: Callable[[str], bool] | None = None,
        limits: TransferLimits | None = None,
        space: Space = "work",
    ) -> Transfer:
        """Copy a guest file to the host file `dest`, or a guest folder's contents into folder `dest`.

        The guest is hostile: names are checked, nothing is written outside `dest`, links are written as
        links only when they stay inside, devices, fifos and sockets are skipped and listed.
        Files are private to the caller.
        Raises `GuestRefused` with cause `not_found` when `source` is absent.
        """
        ...

    async def remove(self, path: PathLike, *, space: Space = "work") -> None:
        """Delete a file or a whole folder in the guest; one that is absent is fine.

        A folder of the verifier space itself is emptied and stays, so that the space is as new.
        """
        ...

    def forward(self, port: int) -> AbstractAsyncContextManager[ByteStream]:
        """A byte stream to 127.0.0.1:`port` in the guest."""
        ...

    async def freeze(self) -> None:
        """Stop every process of `work` where it stands."""
        ...

    async def thaw(self) -> None: ...

    async def open_verifier_space(self, folders: Sequence[PathLike]) -> tuple[str, ...]:
        """Make the `verify` space with `folders` new and empty in it (`/tests`, `/logs/verifier`).

        Returns what was found planted at those places in `work`: paths that exist below a folder, or the
        folder itself (or a parent) being a symbolic link. Called once, with `work` frozen.
        """
        ...

    async def changes(self) -> tuple[Change, ...]:
        """Paths that differ from the image, sorted by path; the agent's own mount points left out."""
        ...

    async def stats(self) -> GuestStats: ...

    async def stop(self) -> None:
        """Flush the writable disk and power off; returns when the VMM is seen gone. Idempotent."""
        ...


@dataclass(frozen=True)
class StartOptions:
    """How one VM is to be started."""

    vm_id: str
    writable: Path
    """The sparse file of the writable layer: made if absent, else used as it is (final disk of a rollout)."""
    hostname: str = "task"
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the image's environment for every exec."""
    workdir: str | None = None
    lifetime_s: float = 4 * 3600.0
    """After this the VMM is killed by another process than ours."""
    boot_timeout_s: float = 120.0
    privileged: bool = False
    """Root in the guest keeps every capability: for a VM that builds an image, never for one of a rollout."""
    console: Path | None = None
    """Where the bounded console goes when the VM ends."""


class Hypervisor(Protocol):
    """Starts fresh VMs. Whether one boots or forks is its own affair, and is recorded in `VmInfo`."""

    @property
    def isolation(self) -> Isolation: ...

    async def prepare(self, machine: Machine) -> str:
        """Make what `start` needs for this machine size (the template); returns the template digest."""
        ...

    def start(self, disk: Disk, machine: Machine, options: StartOptions) -> AbstractAsyncContextManager[Vm]:
        """A fresh VM, confirmed and set up; on exit it is destroyed and seen gone. Raises `BootError`."""
        ...


class Record(Protocol):
    """The folder of one rollout while it is being made."""

    @property
    def folder(self) -> Path: ...

    def sink(self, name: str) -> AbstractAsyncContextManager[Sink]:
        """A bounded file `name` (relative) that takes chunks; says in the file how much was dropped."""
        ...

    def write(self, name: str, data: bytes) -> None: ...

    def note(self, text: str) -> None:
        """A remark that ends up in `rollout.json`."""
        ...


@dataclass(frozen=True)
class AgentResult:
    """How the agent ended. The verifier, not this, decides the verdict."""

    exit_code: int | None = 0
    message: str = ""
    timed_out: bool = False
    oom_killed: bool = False
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost_usd: float | None = None


class Agent(Protocol):
    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """Work on the task for at most `timeout_s` seconds.

        A program in the VM is given the limit as its exec timeout. Raises `AgentError`, `ProviderError`,
        or what `Vm` raises.
        """
        ...


class Verifier(Protocol):
    async def verify(self, vm: Vm, task: Task, record: Record) -> Verdict:
        """Judge the state of `vm`, in its `verify` space. Raises `VerifierError` when there is no verdict."""
        ...


RunOne = Callable[[RolloutSpec], Awaitable[RolloutRecord]]
Done = Callable[[RolloutRecord], Awaitable[None]]


class Engine(Protocol):
    async def run(self, specs: Iterable[RolloutSpec], run_one: RunOne, done: Done) -> None:
        """Do every rollout, as many at once as there is room for; `done` gets each when it is durable.

        A callback and not an iterator: an async generator that is left early would leave its task group, and
        so its VMs, to the garbage collector.
        """
        ...


@runtime_checkable
class Store(Protocol):
    """An index over the job folders; it can be rebuilt from them at any time."""

    def add(self, record: RolloutRecord) -> None:
        """Take in a rollout; one of the same attempt is replaced. May be called from several threads."""
        ...

    def add_many(self, records: Iterable[RolloutRecord]) -> int:
        """The same for many, which is cheaper; returns how many."""
        ...

    def query(self, job_id: str | None = None) -> list[RolloutRecord]: ...
