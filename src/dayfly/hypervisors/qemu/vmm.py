"""One running QEMU process: started confined, watched, and in the end seen gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen  # noqa: TID251 - the type only; `process.spawn` starts it
from typing import Any

import anyio
from qemu.qmp import EventListener, Message, QMPClient, QMPError

from dayfly.errors import BootError, HostError
from dayfly.hypervisors.qemu.tap import CONSOLE_HEAD, CONSOLE_TAIL, Tap
from dayfly.process import PIPE, kill_group, spawn

GONE_TIMEOUT_S = 10.0
STDERR_TAIL = 8 * 1024

QMP_ERRORS = (QMPError, EOFError, OSError)


@dataclass
class Sockets:
    """The host's and QEMU's ends of a VM's three channels. Socket pairs: there is no name to connect to."""

    agent: socket.socket
    qmp: socket.socket
    console: socket.socket
    theirs: tuple[socket.socket, socket.socket, socket.socket]

    @classmethod
    def make(cls, stack: ExitStack) -> Sockets:
        pairs = [socket.socketpair() for _ in range(3)]
        for ours, theirs in pairs:
            ours.setblocking(False)
            stack.callback(ours.close)
            stack.callback(theirs.close)
        return cls(pairs[0][0], pairs[1][0], pairs[2][0], (pairs[0][1], pairs[1][1], pairs[2][1]))

    def close_theirs(self) -> None:
        """After the start QEMU must be the only one to hold its ends, or nobody would see it close them."""
        for end in self.theirs:
            end.close()


@dataclass
class Vmm:
    argv: tuple[str, ...]
    popen: Popen[bytes]
    agent: socket.socket
    qmp: QMPClient
    console: Tap
    stderr: Tap
    exited: anyio.Event = field(default_factory=anyio.Event)
    on_exit: list[Callable[[], None]] = field(default_factory=list)
    """Called once from the event loop, as soon as the process has ended by itself."""
    stop_watching: Callable[[], None] = lambda: None
    host_disk_full: bool = False

    async def command(self, name: str, **arguments: Any) -> Any:
        """One QMP command. Raises `BootError` when QEMU is gone or declines."""
        try:
            return await self.qmp.execute(name, arguments or None)
        except QMP_ERRORS as error:
            raise self.boot_error(f"QEMU did not accept {name}: {error}") from error

    async def restore(self, state: int) -> None:
        """Load the saved state from descriptor `state` (inherited); the guest then goes on by itself."""
        await self.command("migrate-set-capabilities", capabilities=IGNORE_SHARED)
        await self.command("migrate-incoming", uri=f"fd:{state}")

    async def save(self, state: int) -> None:
        """Write the state of the guest's devices to `state`; its RAM is in its file already.

        Migration stops the guest itself before it writes. A guest that was stopped before would be restored as
        stopped, and every fork would have to wait for the end of its migration to say `cont`.
        """
        await self.command("migrate-set-capabilities", capabilities=IGNORE_SHARED)
        self.qmp.send_fd_scm(state)
        await self.command("getfd", fdname="state")
        await self.command("migrate", uri="fd:state")
        while (status := (await self.command("query-migrate"))["status"]) != "completed":
            if status in ("failed", "cancelled"):
                raise self.boot_error(f"saving the template ended as {status}")
            await anyio.sleep(0.005)

    def boot_error(self, message: str, cause: str = "boot_failed") -> BootError:
        """`message` with what QEMU and the guest said last."""
        said = [self.stderr.last_lines(), self.console.last_lines(3)]
        return BootError(message, hint="\n".join(s for s in said if s) or None, cause=cause)

    def kill(self) -> None:
        if self.popen.returncode is None:
            kill_group(self.popen)

    async def destroy(self) -> None:
        """Kill, reap, see the whole group gone, close. Bounded, idempotent; not to be cancelled."""
        with anyio.CancelScope(shield=True):
            self.stop_watching()
            self.kill()
            try:
                await _wait_group_gone(self.popen)
            finally:
                with suppress(Exception), anyio.move_on_after(2):
                    # it raises whatever ended the connection, and a killed QEMU is always such a thing
                    await self.qmp.disconnect()
                self.console.close()
                self.stderr.close()


IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}]


@asynccontextmanager
async def running_vmm(
    argv: Sequence[str], sockets: Sockets, inherit: Sequence[int], *, timeout_s: float
) -> AsyncIterator[Vmm]:
    """Start QEMU and connect to its monitor; on exit it is killed and seen gone.

    Must be called in a thread that outlives the VM: the kernel counts the death of the thread that started a
    process as the death of its parent.
    """
    popen = spawn(argv, pass_fds=inherit, stderr=PIPE, env={})
    try:
        sockets.close_theirs()
        assert popen.stderr is not None
        stderr = Tap(os.dup(popen.stderr.fileno()), head=0, tail=STDERR_TAIL)
        popen.stderr.close()
        console = Tap(os.dup(sockets.console.fileno()), head=CONSOLE_HEAD, tail=CONSOLE_TAIL)
        vmm = Vmm(tuple(argv), popen, sockets.agent, _qmp_client(), console, stderr)
    except BaseException:
        kill_group(popen)
        popen.wait()
        raise
    vmm.stop_watching = _watch_exit(vmm)
    try:
        await _connect(vmm, sockets.qmp, timeout_s)
        yield vmm
    finally:
        await vmm.destroy()


def _qmp_client() -> QMPClient:
    client = QMPClient()
    # the library logs a traceback when QEMU goes away; here that is everyday life, and we report it ourselves
    client.logger = logging.Logger("dayfly.qmp", logging.CRITICAL + 1)
    return client


async def _connect(vmm: Vmm, sock: socket.socket, timeout_s: float) -> None:
    vmm.qmp.register_listener(EventListener(names=("BLOCK_IO_ERROR",), event_filter=lambda e: _io_error(vmm, e)))
    try:
        with anyio.fail_after(timeout_s):
            await vmm.qmp.connect(sock)
    except TimeoutError:
        raise vmm.boot_error(f"QEMU's monitor did not answer within {timeout_s:g} s") from None
    except QMP_ERRORS as error:
        with anyio.move_on_after(1):
            await vmm.exited.wait()  # its last words come with its end
        raise vmm.boot_error(f"QEMU did not start (status {vmm.popen.returncode})") from error


def _io_error(vmm: Vmm, event: Message) -> bool:
    """The host's disk is full: QEMU has paused the guest, which nothing would ever wake. A filter, so no task."""
    data = event.get("data")
    if isinstance(data, dict) and data.get("nospace"):
        vmm.host_disk_full = True
        vmm.kill()
    return False


def _watch_exit(vmm: Vmm) -> Callable[[], None]:
    """Have `vmm.exited` set the moment that the process ends; returns how to stop that."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(vmm.popen.pid)

    def stop() -> None:
        nonlocal pidfd
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            pidfd = -1

    def ended() -> None:
        stop()
        vmm.popen.poll()
        vmm.exited.set()
        for call in vmm.on_exit:
            call()

    loop.add_reader(pidfd, ended)
    return stop


async def _wait_group_gone(popen: Popen[bytes]) -> None:
    """Raises `HostError` when a process of the group is left after the bound."""
    pause = 0.0005
    with anyio.move_on_after(GONE_TIMEOUT_S):
        while popen.poll() is None or group_alive(popen.pid):
            await anyio.sleep(pause)
            pause = min(pause * 1.3, 0.05)
            _kill_rest(popen.pid)
        return
    raise HostError(
        f"process group {popen.pid} of a VM is still there after {GONE_TIMEOUT_S:g} s",
        hint="a process may hang in the kernel; look at /proc/PID/stack, then run `dayfly gc`",
        cause="not_gone",
    )


def _kill_rest(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def group_alive(group: int) -> bool:
    """Whether a process of the group is there and not just a zombie that the host's init has yet to reap."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return any(_state_and_group(p) == group for p in Path("/proc").glob("[0-9]*"))


def _state_and_group(folder: Path) -> int | None:
    """The process group of a process that is not a zombie."""
    try:
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[2])


def processes_of_group(group: int) -> list[int]:
    """The processes of a group that are not zombies, parents before children."""
    found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _state_and_group(p) == group]
    return sorted(found)
