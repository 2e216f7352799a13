"""A hypervisor without machines: for scale tests, crash tests and trying out a pipeline.

It is public, it is never chosen silently (`--hypervisor fake`), and every result of it carries the
isolation class `fake`. A fake VM is a dictionary of files. Programs in it are *fake scripts*: files whose
first line is `#!fake`, one statement a line:

    print TEXT            one line on standard output
    write PATH TEXT       make a file (relative to the working directory)
    append PATH TEXT
    remove PATH
    expect PATH TEXT      exit 1 unless the file holds exactly TEXT (and a newline)
    sleep SECONDS
    fill                  from here on the disk is full
    oom                   the workload is killed for memory: signal 9, counted
    die                   the VM is lost
    exit N

so the same task folders work for the fake with `#!fake` scripts and for a VM with shell scripts.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import shlex
import stat
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from dayfly.errors import GuestLost, GuestRefused, LimitError
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


@dataclass
class _Exit:
    code: int | None = 0
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False


@dataclass
class FakeVm:
    """See `dayfly.protocols.Vm`; files live in memory, in one dictionary per space."""

    info: VmInfo
    options: StartOptions
    env: dict[str, str]
    workdir: str
    files: dict[Space, dict[str, _File]]
    frozen: bool = False
    oom_kills: int = 0
    disk_full: bool = False
    dead: bool = False
    verifier_folders: tuple[str, ...] | None = None

    def _check(self) -> None:
        if self.dead:
            raise GuestLost("the fake VM was told to die", cause="guest_lost")

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
        here = _name(cwd) if cwd is not None else self.workdir
        started = time.monotonic()
        output = bytearray()
        ended = await self._run(names, here, space, timeout_s, output)
        if stdout is not None and output:
            stdout(bytes(output))
        return ExecResult(
            exit_code=ended.code,
            signal=ended.signal,
            stdout=_captured(bytes(output)),
            timed_out=ended.timed_out,
            oom_killed=ended.oom,
            duration_s=time.monotonic() - started,
        )

    async def _run(
        self, argv: list[str], cwd: str, space: Space, timeout_s: float | None, output: bytearray
    ) -> _Exit:
        program = argv[0]
        if program in ("true", "/bin/true"):
            return _Exit(0)
        if posixpath.basename(program) in ("chmod", "mkdir"):
            return _Exit(0)  # a fake file is executable by its first line, and needs no folder
        if program in ("false", "/bin/false"):
            return _Exit(1)
        path = posixpath.normpath(posixpath.join(cwd, program))
        script = self._files(path, space).get(path)
        if script is None or not script.data.startswith(b"#!fake"):
            raise GuestRefused(f"{program}: not a program that the fake VM knows", cause="not_found")
        with anyio.move_on_after(timeout_s) as scope:
            return await self._statements(script.data.decode().splitlines()[1:], cwd, space, output)
        if scope.cancelled_caught:
            return _Exit(None, 9, timed_out=True)
        raise AssertionError("unreachable")

    async def _statements(self, lines: list[str], cwd: str, space: Space, output: bytearray) -> _Exit:
        for line in lines:
            verb, *rest = shlex.split(line, comments=True) or ["nothing"]
            path = posixpath.normpath(posixpath.join(cwd, rest[0])) if rest else ""
            files = self._files(path, space) if path else {}
            text = (" ".join(rest[1:]) + "\n").encode()
            match verb:
                case "nothing":
                    pass
                case "print":
                    output += (" ".join(rest) + "\n").encode()
                case "write":
                    if self.disk_full and files is self.files["work"]:
                        return _Exit(1)
                    files[path] = _File(text)
                case "append":
                    files.setdefault(path, _File()).data += text
                case "remove":
                    files.pop(path, None)
                case "expect":
                    if path not in files or files[path].data != text:
                        output += f"expected {rest[0]} to hold {text!r}\n".encode()
                        return _Exit(1)
                case "sleep":
                    await anyio.sleep(float(rest[0]))
                case "fill":
                    self.disk_full = True
                case "oom":
                    self.oom_kills += 1
                    return _Exit(None, 9, oom=True)
                case "die":
                    self.dead = True
                    self._check()
                case "exit":
                    return _Exit(int(rest[0]))
                case _:
                    raise GuestRefused(f"{line!r} is not a statement of a fake script", cause="not_executable")
        return _Exit(0)

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
            self._files(path, space)[path] = _File(data, file_mode)
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode("utf-8", "surrogateescape"))
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
        size = 0
        entries: dict[str, EntryMeta] = {}
        if root not in below:
            dest.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, file in below.items():
            relative = posixpath.relpath(name, root) if name != root else ""
            if exclude is not None and relative and exclude(relative):
                continue
            target = dest / relative if relative else dest
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.write_bytes(file.data)
            entries[relative] = EntryMeta(mode=file.mode, uid=0, gid=0)
            size += len(file.data)
        return Transfer(files=len(entries), bytes=size, entries=entries)

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
        self.frozen = True

    async def thaw(self) -> None:
        self._check()
        self.frozen = False

    async def open_verifier_space(self, folders: Sequence[PathLike]) -> tuple[str, ...]:
        self._check()
        if self.verifier_folders is not None:
            raise GuestRefused("the verifier space is open already", cause="wrong_state")
        self.verifier_folders = tuple(posixpath.normpath(_name(f)) for f in folders)
        return tuple(
            sorted(n for n in self.files["work"] if any(n.startswith(f + "/") for f in self.verifier_folders))
        )

    async def changes(self) -> tuple[Change, ...]:
        self._check()
        return tuple(
            Change(
                path=name,
                kind="file",
                mode=file.mode,
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
            self.dead = True
            self._save()

    def _save(self) -> None:
        """Keep the files of `work` as the writable disk, for the next VM on it."""
        disk = {n: [f.data.hex(), f.mode] for n, f in self.files["work"].items()}
        self.options.writable.write_text(json.dumps(disk))


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
    running: int = 0
    most_running: int = 0
    ids: set[str] = field(default_factory=set)

    @property
    def isolation(self) -> Isolation:
        return "fake"

    async def prepare(self, machine: Machine) -> str:
        return "sha256:" + hashlib.sha256(f"fake {machine.cpus} {machine.memory_mib}".encode()).hexdigest()

    @asynccontextmanager
    async def start(self, disk: Disk, machine: Machine, options: StartOptions) -> AsyncIterator[Vm]:
        if options.vm_id in self.ids:
            raise AssertionError(f"VM id {options.vm_id} was used before")
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
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield vm
        finally:
            self.running -= 1
            if not vm.dead:
                vm._save()
            vm.dead = True
            if options.console is not None:
                options.console.write_bytes(b"")


def _load(path: Path) -> dict[str, _File]:
    if not path.exists():
        return {}
    return {n: _File(bytes.fromhex(d), m) for n, (d, m) in json.loads(path.read_text()).items()}
