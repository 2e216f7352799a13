"""A hypervisor without machines: for scale tests, crash tests and trying out a pipeline.

It is public, it is never chosen silently (`--hypervisor fake`), and every result of it carries the
isolation class `fake`. A fake VM is a dictionary of files. Programs in it are *fake scripts*: files whose
first line is `#!fake`, one statement a line:

    print TEXT            one line on standard output
    env NAME              the value of a variable, as a line
    pwd                   the working directory, as a line
    cat                   standard input, as it is
    write PATH TEXT       make a file (relative to the working directory)
    append PATH TEXT
    remove PATH
    expect PATH TEXT      exit 1 unless the file holds exactly TEXT (and a newline)
    sleep SECONDS
    fill                  from here on the disk is full
    oom                   the workload is killed for memory: signal 9, counted
    die                   the VM is lost
    exit N

so the same task folders work for the fake with `#!fake` scripts and for a VM with shell scripts. `sh FILE` and
`sh -c FILE` (or bash) run such a file, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shlex
import stat
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from dayfly.errors import BootError, GuestLost, GuestRefused, LimitError
from dayfly.model import (
    Captured,
    Change,
    Disk,
    EntryMeta,
    ExecResult,
    GuestStats,
    Isolation,
    Machine,
    Space,
    Transfer,
    VmInfo,
)
from dayfly.protocols import PathLike, Sink, StartOptions, TransferLimits, Vm

ARGUMENT_LIMIT = 128 * 1024
KEEP = 64 * 1024


def _name(path: PathLike) -> str:
    return path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path


def _captured(data: bytes) -> Captured:
    if len(data) <= 2 * KEEP:
        return Captured(head=data)
    return Captured(head=data[:KEEP], tail=data[-KEEP:], dropped=len(data) - 2 * KEEP)


@dataclass
class _File:
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


@dataclass
class _Exit:
    code: int | None = 0
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False


@dataclass
class _Process:
    """What one running script has of its own."""

    cwd: str
    env: Mapping[str, str]
    stdin: bytes
    space: Space
    sink: Sink | None
    output: bytearray = field(default_factory=bytearray)

    def say(self, data: bytes) -> None:
        self.output += data
        if self.sink is not None and data:
            self.sink(data)


@dataclass
class FakeVm:
    """See `dayfly.protocols.Vm`; files live in memory, in one dictionary per space."""

    info: VmInfo
    options: StartOptions
    env: dict[str, str]
    workdir: str
    files: dict[Space, dict[str, _File]]
    oom_kills: int = 0
    disk_full: bool = False
    verifier_folders: tuple[str, ...] | None = None
    _gone: anyio.Event = field(default_factory=anyio.Event)
    _thawed: anyio.Event | None = None
    """There while `work` is frozen."""
    _started: float = field(default_factory=time.monotonic)

    @property
    def _left_s(self) -> float:
        """Seconds of its lifetime that are left."""
        return self._started + self.options.lifetime_s - time.monotonic()

    @property
    def dead(self) -> bool:
        if self._left_s <= 0:
            self._gone.set()
        return self._gone.is_set()

    def _check(self) -> None:
        if self.dead:
            raise GuestLost("the fake VM is gone", cause="guest_lost")

    def _files(self, path: str, space: Space) -> dict[str, _File]:
        """Which dictionary holds `path`: the verifier's own folders are invisible to `work`."""
        if space == "verify":
            if self.verifier_folders is None:
                raise GuestRefused("there is no verifier space yet", cause="no_verifier_space")
            if any(path == f or path.startswith(f + "/") for f in self.verifier_folders):
                return self.files["verify"]
        return self.files["work"]

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
        self._check()
        await anyio.lowlevel.checkpoint()
        names = [_name(a) for a in argv]
        for text in [*names, *(env or {}).values()]:
            if len(text.encode("utf-8", "surrogateescape")) >= ARGUMENT_LIMIT:
                raise LimitError(f"an argument is longer than {ARGUMENT_LIMIT} bytes")
        process = _Process(
            cwd=_name(cwd) if cwd is not None else self.workdir,
            env={**self.env, **(env or {})},
            stdin=await _all_of(stdin),
            space=space,
            sink=stdout,
        )
        started = time.monotonic()
        ended = await self._run(names, process, timeout_s)
        return ExecResult(
            exit_code=ended.code,
            signal=ended.signal,
            stdout=_captured(bytes(process.output)),
            timed_out=ended.timed_out,
            oom_killed=ended.oom,
            duration_s=time.monotonic() - started,
        )

    async def _run(self, argv: list[str], process: _Process, timeout_s: float | None) -> _Exit:
        program = argv[0]
        if posixpath.basename(program) in ("sh", "bash") and len(argv) > 1:
            # No shell: it runs the one program that it is given, as a file or as a command line of one word.
            program = argv[2].strip() if argv[1] == "-c" and len(argv) == 3 else argv[1]
        if program in ("true", "/bin/true"):
            return _Exit(0)
        if posixpath.basename(program) in ("chmod", "mkdir"):
            return _Exit(0)  # a fake file is executable by its first line, and needs no folder
        if program in ("false", "/bin/false"):
            return _Exit(1)
        path = posixpath.normpath(posixpath.join(process.cwd, program))
        script = self._files(path, process.space).get(path)
        if script is None or not script.data.startswith(b"#!fake"):
            raise GuestRefused(f"{program}: not a program that the fake VM knows", cause="not_found")
        with anyio.move_on_after(timeout_s) as scope:
            return await self._statements(script.data.decode().splitlines()[1:], process)
        if scope.cancelled_caught:
            return _Exit(None, 9, timed_out=True)
        raise AssertionError("unreachable")

    async def _pass(self, seconds: float, space: Space) -> None:
        """Let a script's time go by: it stands still while frozen, and ends with its VM."""
        if seconds > 0:
            with anyio.move_on_after(min(seconds, self._left_s)):
                await self._gone.wait()
        while space == "work" and self._thawed is not None and not self.dead:
            with anyio.move_on_after(self._left_s):
                async with anyio.create_task_group() as either:
                    either.start_soon(_cancel_after, self._thawed, either.cancel_scope)
                    either.start_soon(_cancel_after, self._gone, either.cancel_scope)
        self._check()

    async def _statements(self, lines: list[str], process: _Process) -> _Exit:
        for line in lines:
            verb, *rest = shlex.split(line, comments=True) or ["nothing"]
            await self._pass(float(rest[0]) if verb == "sleep" else 0, process.space)
            ended = self._statement(verb, rest, process)
            if ended is not None:
                return ended
        return _Exit(0)

    def _statement(self, verb: str, rest: list[str], process: _Process) -> _Exit | None:
        """Do one statement; an `_Exit` ends the script."""
        path = posixpath.normpath(posixpath.join(process.cwd, rest[0])) if rest else ""
        files = self._files(path, process.space) if path else {}
        text = (" ".join(rest[1:]) + "\n").encode()
        match verb:
            case "nothing" | "sleep":
                pass
            case "print":
                process.say((" ".join(rest) + "\n").encode())
            case "env":
                process.say((process.env.get(rest[0], "") + "\n").encode())
            case "pwd":
                process.say((process.cwd + "\n").encode())
            case "cat":
                process.say(process.stdin)
            case "write" | "append" if self.disk_full and files is self.files["work"]:
                return _Exit(1)
            case "write":
                files[path] = _File(text)
            case "append":
                files.setdefault(path, _File()).data += text
            case "remove":
                files.pop(path, None)
            case "expect":
                if path not in files or files[path].data != text:
                    process.say(f"expected {rest[0]} to hold {text!r}\n".encode())
                    return _Exit(1)
            case "fill":
                self.disk_full = True
            case "oom":
                self.oom_kills += 1
                return _Exit(None, 9, oom=True)
            case "die":
                self._gone.set()
                self._check()
            case "exit":
                return _Exit(int(rest[0]))
            case _:
                raise GuestRefused(f"{verb!r} is not a statement of a fake script", cause="not_executable")
        return None

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
        self._check()
        root = _name(dest)
        skipped: list[str] = []
        count = size = 0
        digest = hashlib.sha256()
        for name, data, file_mode in _host_files(source, mode):
            if exclude is not None and name and exclude(name):
                skipped.append(name)
                continue
            path = posixpath.normpath(posixpath.join(root, name)) if name else posixpath.normpath(root)
            known = (meta or {}).get(name)
            made = _File(data, file_mode) if known is None else _File(data, known.mode, known.uid, known.gid)
            self._files(path, space)[path] = made
            _add(digest, name, data)
            count, size = count + 1, size + len(data)
        return Transfer(count, size, "sha256:" + digest.hexdigest(), tuple(skipped))

    async def get(
        self,
        source: PathLike,
        dest: Path,
        *,
        exclude: Callable[[str], bool] | None = None,
        limits: TransferLimits | None = None,
        space: Space = "work",
    ) -> Transfer:
        self._check()
        root = posixpath.normpath(_name(source))
        files = self._files(root, space)
        below = {n: f for n, f in files.items() if n == root or n.startswith(root.rstrip("/") + "/")}
        if not below and not (space == "verify" and root in (self.verifier_folders or ())):
            raise GuestRefused(f"{root}: no such file or folder in the guest", cause="not_found")
        wanted = {posixpath.relpath(n, root) if n != root else "": f for n, f in sorted(below.items())}
        skipped = [n for n in wanted if exclude is not None and n and exclude(n)]
        for name in skipped:
            del wanted[name]
        _refuse_over(limits or TransferLimits(), wanted)
        if root not in below:
            dest.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        for name, file in wanted.items():
            target = dest / name if name else dest
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_private(target, file)
            _add(digest, name, file.data)
        return Transfer(
            files=len(wanted),
            bytes=sum(len(f.data) for f in wanted.values()),
            digest="sha256:" + digest.hexdigest(),
            skipped=tuple(skipped),
            entries={n: EntryMeta(mode=f.mode, uid=f.uid, gid=f.gid) for n, f in wanted.items()},
        )

    async def remove(self, path: PathLike, *, space: Space = "work") -> None:
        self._check()
        root = posixpath.normpath(_name(path))
        files = self._files(root, space)
        for name in [n for n in files if n == root or n.startswith(root.rstrip("/") + "/")]:
            del files[name]

    @asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[ByteStream]:
        raise GuestRefused(f"nothing listens on port {port} in a fake VM", cause="connection_refused")
        yield

    async def freeze(self) -> None:
        self._check()
        if self._thawed is None:
            self._thawed = anyio.Event()

    async def thaw(self) -> None:
        self._check()
        if self._thawed is not None:
            self._thawed.set()
            self._thawed = None

    async def open_verifier_space(self, folders: Sequence[PathLike]) -> tuple[str, ...]:
        self._check()
        if self.verifier_folders is not None:
            raise GuestRefused("the verifier space is open already", cause="wrong_state")
        self.verifier_folders = tuple(posixpath.normpath(_name(f)) for f in folders)
        planted = {n for n in self.files["work"] for f in self.verifier_folders if _in_the_way(n, f)}
        return tuple(sorted(planted))

    async def changes(self) -> tuple[Change, ...]:
        self._check()
        return tuple(
            Change(
                path=name,
                kind="file",
                mode=file.mode,
                uid=file.uid,
                gid=file.gid,
                size=len(file.data),
                digest="sha256:" + hashlib.sha256(file.data).hexdigest(),
            )
            for name, file in sorted(self.files["work"].items())
        )

    async def stats(self) -> GuestStats:
        self._check()
        size = 1 << 30
        return GuestStats(
            memory_peak_bytes=1 << 20,
            memory_limit_bytes=1 << 28,
            oom_kills=self.oom_kills,
            disk_used_bytes=size if self.disk_full else 0,
            disk_free_bytes=0 if self.disk_full else size,
            disk_size_bytes=size,
            time_unix=time.time(),
        )

    async def stop(self) -> None:
        if not self.dead:
            self._gone.set()
            self._save()

    def _save(self) -> None:
        """Keep the files of `work` as the writable disk, for the next VM on it."""
        disk = {n: [f.data.hex(), f.mode, f.uid, f.gid] for n, f in self.files["work"].items()}
        self.options.writable.write_text(json.dumps(disk))


async def _all_of(stdin: bytes | AsyncIterable[bytes] | None) -> bytes:
    if stdin is None or isinstance(stdin, bytes):
        return stdin or b""
    return b"".join([chunk async for chunk in stdin])


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _write_private(target: Path, file: _File) -> None:
    target.unlink(missing_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 | file.mode & 0o100)
    with os.fdopen(fd, "wb") as out:
        out.write(file.data)


def _add(digest: Any, name: str, data: bytes) -> None:
    digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode("utf-8", "surrogateescape"))


def _in_the_way(path: str, folder: str) -> bool:
    """Whether a file lies below `folder`, or where it or a parent of it must be a folder."""
    return path.startswith(folder + "/") or (folder + "/").startswith(path + "/")


def _refuse_over(limits: TransferLimits, files: Mapping[str, _File]) -> None:
    sizes = [len(f.data) for f in files.values()]
    for what, found, limit in (
        ("files", len(sizes), limits.files),
        ("bytes", sum(sizes), limits.bytes),
        ("bytes in one file", max(sizes, default=0), limits.file_bytes),
        ("folders deep", max((n.count("/") for n in files), default=0), limits.depth),
    ):
        if found > limit:
            raise LimitError(f"{found} {what} are more than the limit of {limit}")


def _host_files(source: Path | bytes, mode: int | None) -> Iterator[tuple[str, bytes, int]]:
    if isinstance(source, bytes):
        yield "", source, mode if mode is not None else 0o644
    elif source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                yield (
                    path.relative_to(source).as_posix(),
                    path.read_bytes(),
                    stat.S_IMODE(path.stat().st_mode),
                )
    else:
        yield "", source.read_bytes(), mode if mode is not None else stat.S_IMODE(source.stat().st_mode)


@dataclass
class FakeHypervisor:
    """Starts fake VMs. `fault` may return an exception for a start, to test what happens then."""

    fault: Callable[[StartOptions], Exception | None] | None = None
    start_delay_s: float = 0.0
    started: int = 0
    most_running: int = 0
    ids: set[str] = field(default_factory=set)
    _vms: dict[str, FakeVm] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """How many VMs there are that are not gone."""
        return sum(not vm.dead for vm in self._vms.values())

    @property
    def isolation(self) -> Isolation:
        return "fake"

    async def prepare(self, machine: Machine) -> str:
        return "sha256:" + hashlib.sha256(f"fake {machine.cpus} {machine.memory_mib}".encode()).hexdigest()

    @asynccontextmanager
    async def start(self, disk: Disk, machine: Machine, options: StartOptions) -> AsyncIterator[Vm]:
        if options.vm_id in self.ids:
            raise BootError(f"a VM called {options.vm_id} was there before", hint="give each VM a new id")
        self.ids.add(options.vm_id)
        await anyio.sleep(self.start_delay_s)
        if self.fault is not None and (error := self.fault(options)) is not None:
            raise error
        vm = FakeVm(
            info=VmInfo(id=options.vm_id, isolation="fake", how="fake", template=await self.prepare(machine)),
            options=options,
            env={**disk.config.env, **options.env},
            workdir=options.workdir or disk.config.workdir,
            files={"work": _load(options.writable), "verify": {}},
        )
        self.started += 1
        self._vms[options.vm_id] = vm
        self.most_running = max(self.most_running, self.running)
        try:
            yield vm
        finally:
            await vm.stop()
            del self._vms[options.vm_id]
            if options.console is not None:
                options.console.write_bytes(b"")


def _load(path: Path) -> dict[str, _File]:
    if not path.exists():
        return {}
    return {n: _File(bytes.fromhex(data), *meta) for n, (data, *meta) in json.loads(path.read_text()).items()}
