"""Does KVM work here? Asked of a guest: a /dev/kvm that opens proves nothing.

On some hosts (nested, or with a restricted KVM) every stock guest hangs at boot. The probe boots the real
kernel, confined like any VM, and waits for the kernel to say that it starts /init. The answer is kept per boot
of the host, kernel of the host and QEMU.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen  # noqa: TID251 - the type only

from dayfly.errors import DayflyError
from dayfly.hypervisors.qemu.confine import Uids, chain, find_launchers
from dayfly.hypervisors.qemu.disks import memory_file, open_in
from dayfly.hypervisors.qemu.initramfs import make_initramfs
from dayfly.hypervisors.qemu.kernel import boot_image, find_kernel
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.process import PIPE, kill_group, spawn, which

PROBE_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 5.0
SIGN = b"Run /init as init process"
"""The kernel's own words when it has booted and found the initramfs (at loglevel 6 or more)."""


@dataclass(frozen=True)
class KvmProbe:
    works: bool
    detail: str
    seconds: float = 0.0


def probe_kvm(settings: QemuSettings, *, fresh: bool = False) -> KvmProbe:
    """The kept answer, or a new one from a real guest. Blocking; never longer than some 15 s."""
    if not Path("/dev/kvm").exists():
        return KvmProbe(False, "there is no /dev/kvm")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return KvmProbe(False, "this user may not open /dev/kvm (group kvm)")
    try:
        kept = settings.cache / "host" / f"kvm-{_where(settings)}.json"
    except DayflyError as error:
        return KvmProbe(False, f"not probed: {error.message}")
    if not fresh and (known := _read(kept)) is not None:
        return known
    try:
        answer = _probe(settings)
    except (DayflyError, OSError) as error:
        return KvmProbe(False, f"not probed: {error}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    made = kept.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps(asdict(answer)))
    made.replace(kept)
    return answer


def _where(settings: QemuSettings) -> str:
    """What an answer is valid for."""
    qemu = which(settings.qemu_name, "install QEMU").resolve()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    parts = (boot_id, os.uname().release, str(qemu), qemu.stat().st_mtime_ns, os.geteuid(), settings.kernel)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> KvmProbe | None:
    try:
        return KvmProbe(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _probe(settings: QemuSettings) -> KvmProbe:
    qemu = str(which(settings.qemu_name, "install QEMU").resolve())
    started = time.monotonic()
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        stack.callback(theirs.close)
        image = boot_image(find_kernel(settings.kernel, settings.cache), settings.cache)
        kernel = open_in(stack, image, os.O_RDONLY)
        initrd = memory_file(stack, "dayfly-probe")
        os.write(initrd, make_initramfs(b"#!/no\n", []))
        uids = Uids(settings.run_folder)
        stack.callback(uids.close)
        lifetime_s = PROBE_TIMEOUT_S + 2
        confined = chain(
            find_launchers(), qemu, uid=uids.take(), lifetime_s=lifetime_s, largest_file=1 << 30, kvm=True
        )
        argv = [*confined, *_guest(settings.architecture, qemu, kernel, initrd, theirs.fileno())]
        popen = spawn(argv, pass_fds=(kernel, initrd, theirs.fileno()), stderr=PIPE, env={})
        theirs.close()
        try:
            said = _listen(ours, started + PROBE_TIMEOUT_S)
        finally:
            status, complaint = _end(popen)
    seconds = round(time.monotonic() - started, 2)
    if SIGN in said:
        return KvmProbe(True, f"a guest booted under KVM in {seconds:g} s", seconds)
    what = "hung" if status in (None, -9, 137) else f"ended with status {status}"
    detail = f"/dev/kvm opens, but a guest {what} ({len(said)} bytes of console)"
    return KvmProbe(False, f"{detail}: {complaint}" if complaint else detail, seconds)


def _end(popen: Popen[bytes]) -> tuple[int | None, str]:
    """Kill and reap; the status and QEMU's last line.

    The status is None when even SIGKILL does not end it: a process that hangs in the kernel's KVM code.
    """
    if popen.poll() is None:
        kill_group(popen)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while popen.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert popen.stderr is not None
    with popen.stderr:
        if popen.returncode is None:
            return None, ""
        # not to its end: a QEMU that hangs in the kernel would hold it open for ever
        os.set_blocking(popen.stderr.fileno(), False)
        lines = (popen.stderr.read(64 * 1024) or b"").decode("utf-8", "replace").strip().splitlines()
    return popen.returncode, lines[-1] if lines else ""


def _guest(architecture: str, qemu: str, kernel: int, initrd: int, console: int) -> list[str]:
    board, port = ("virt", "ttyAMA0") if architecture == "aarch64" else ("microvm,acpi=on,rtc=on", "ttyS0")
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-M", board, "-accel", "kvm", "-cpu", "host", "-m", "256M", "-smp", "1"),
        *("-chardev", f"socket,id=console,fd={console}", "-serial", "chardev:console"),
        *("-kernel", f"/proc/self/fd/{kernel}", "-initrd", f"/proc/self/fd/{initrd}"),
        *("-append", f"console={port} loglevel=7 panic=-1 reboot=t"),
    ]


def _listen(sock: socket.socket, deadline: float) -> bytes:
    """What the console says until the sign, the end, or the deadline."""
    said = bytearray()
    while SIGN not in said and len(said) < 1 << 20 and (left := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            break
        data = sock.recv(65536)
        if not data:
            break
        said += data
    return bytes(said)
