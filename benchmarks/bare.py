"""The reference for a fork: QEMU restoring the same template with nothing of dayfly around it.

No confinement, no ownership, no bounded console, no task of its own, hand-written QMP; the same devices, the same
state, the same guest client, the same request. What `fork.py` measures against.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from dayfly.guest.client import GuestClient
from dayfly.hypervisors.qemu.disks import open_in
from dayfly.hypervisors.qemu.host import Host
from dayfly.hypervisors.qemu.machine import Descriptors, devices
from dayfly.hypervisors.qemu.template import Template
from dayfly.model import Disk, ExecResult, Machine


class Monitor:
    """Just enough QMP: a command, its answer, events thrown away."""

    def __init__(self, sock: socket.socket) -> None:
        self.lines = sock.makefile("rwb", buffering=0)
        self.lines.readline()
        self.command("qmp_capabilities")

    def command(self, name: str, **arguments: object) -> None:
        self.lines.write(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        while "return" not in (answer := json.loads(self.lines.readline())):
            if "error" in answer:
                raise RuntimeError(str(answer))


def start_qemu(
    stack: ExitStack, host: Host, machine: Machine, template: Template, disk: Disk, writable: Path
) -> tuple[subprocess.Popen[bytes], socket.socket, Monitor, int]:
    base = open_in(stack, disk.path, os.O_RDONLY)
    work = open_in(stack, writable, os.O_RDWR), open_in(stack, writable, os.O_RDONLY)
    state = stack.enter_context(template.open_state())
    pairs = [socket.socketpair() for _ in range(3)]
    for pair in pairs:
        for end in pair:
            stack.callback(end.close)
    agent, qmp, console = (theirs.fileno() for _, theirs in pairs)
    fds = Descriptors(agent, qmp, console, template.ram, base, *work)
    argv = [*devices(host.platform, machine, fds, "bare", share_ram=False), "-incoming", "defer"]
    popen = subprocess.Popen(argv, pass_fds=(*fds.all, state), stderr=subprocess.DEVNULL)
    stack.callback(popen.wait)
    stack.callback(popen.kill)
    for _, theirs in pairs:
        theirs.close()
    return popen, pairs[0][0], Monitor(pairs[1][0]), state


@asynccontextmanager
async def bare_fork(
    host: Host, machine: Machine, template: Template, disk: Disk, writable: Path
) -> AsyncIterator[GuestClient]:
    """A restored guest, told who it is and with its disks mounted; gone at the end."""
    with ExitStack() as stack:
        _, agent, monitor, state = start_qemu(stack, host, machine, template, disk, writable)
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        monitor.command("migrate-set-capabilities", capabilities=capabilities)
        monitor.command("migrate-incoming", uri=f"fd:{state}")
        async with GuestClient(agent) as guest:
            await guest.clone(hostname="bare", timeout_s=60)
            await guest.setup(env={}, workdir="/", user="")
            yield guest


async def bare_fork_s(
    host: Host, machine: Machine, template: Template, disk: Disk, writable: Path, argv: list[str]
) -> tuple[float, float]:
    """Seconds to the result of the first command, and to the end of a fork-exec-kill cycle."""
    started = time.perf_counter()
    async with bare_fork(host, machine, template, disk, writable) as guest:
        result: ExecResult = await guest.exec(argv)
        answered = time.perf_counter()
    assert result.ok, result
    return answered - started, time.perf_counter() - started
