"""What this host has and lacks for dayfly, each finding with its fix. Nothing is printed here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from dayfly.errors import DayflyError
from dayfly.guest.build import agent_binary
from dayfly.hypervisors.qemu.confine import find_launchers
from dayfly.hypervisors.qemu.host import choose_accelerator, qemu_version
from dayfly.hypervisors.qemu.kernel import find_kernel, load_modules
from dayfly.hypervisors.qemu.probe import probe_kvm
from dayfly.hypervisors.qemu.settings import QemuSettings
from dayfly.process import run, which

Status = Literal["ok", "warn", "fail"]

MIN_FREE_DISK = 4 * 1024**3
MIN_FREE_MEMORY = 2 * 1024**3
PROBE_TIMEOUT_S = 20.0

TCG_PROMISE = (
    "tcg: every VM is emulated. QEMU's developers treat only virtualisation (KVM) as a security boundary; "
    "a guest that breaks TCG is a bug to them, not a vulnerability. Confinement of the QEMU process is what is left"
)
KVM_PROMISE = "kvm: QEMU treats escapes from a guest as security bugs; the QEMU process is confined as well"


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    detail: str
    fix: str = ""


def checks(settings: QemuSettings | None = None) -> list[Check]:
    """Every check, in the order in which to read them. Blocking; under a minute even on a sick host."""
    settings = settings or QemuSettings()
    made: list[tuple[str, Callable[[QemuSettings], Check]]] = [
        ("python", _python),
        ("os", _os),
        ("qemu", _qemu),
        ("launchers", _launchers),
        ("mkfs.ext4", lambda _: _program("mkfs.ext4", "e2fsprogs")),
        ("tar2sqfs", lambda _: _program("tar2sqfs", "squashfs-tools-ng")),
        ("registries", _registries),
        ("dockerfiles", _dockerfiles),
        ("kernel", _kernel),
        ("guest agent", _agent),
        ("kvm", _kvm),
        ("isolation", _isolation),
        ("user namespaces", _user_namespaces),
        ("memory", _memory),
        ("disk space", _disk_space),
        ("cache folder", _cache_folder),
        ("sqlite", _sqlite),
    ]
    return [_safely(name, check, settings) for name, check in made]


def _safely(name: str, check: Callable[[QemuSettings], Check], settings: QemuSettings) -> Check:
    """A check that fails with an error of ours has found something; any other error is a finding, too."""
    try:
        return check(settings)
    except DayflyError as error:
        return Check(name, "fail", error.message, error.hint or "")
    except OSError as error:
        return Check(name, "fail", str(error))


def _python(_: QemuSettings) -> Check:
    return Check("python", "ok", f"Python {platform.python_version()}")


def _os(settings: QemuSettings) -> Check:
    detail = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return Check("os", "fail", detail, "dayfly runs on Linux")
    if settings.architecture != "x86_64":
        return Check("os", "warn", detail, "only x86_64 is tested")
    return Check("os", "ok", detail)


def _qemu(settings: QemuSettings) -> Check:
    qemu = which(settings.qemu_name, "install the package qemu-system-x86").resolve()
    return Check("qemu", "ok", qemu_version(qemu).rpartition(" ")[0])


def _launchers(_: QemuSettings) -> Check:
    find_launchers()
    return Check("launchers", "ok", "prlimit, setpriv, timeout and bwrap are there")


def _program(name: str, package: str) -> Check:
    return Check(name, "ok", str(which(name, f"install the package {package}")))


def _registries(_: QemuSettings) -> Check:
    """Only pulls need skopeo: what is imported or here already is used without."""
    from dayfly.images import skopeo

    try:
        return Check("registries", "ok", skopeo.version())
    except DayflyError as error:
        return Check("registries", "warn", f"images cannot be pulled: {error.message}", error.hint or "")


def _dockerfiles(_: QemuSettings) -> Check:
    """Only tasks with a Dockerfile need a builder, so without one the host is fit for all others."""
    from dayfly.images import ImageStore
    from dayfly.images.builder.builder_image import BUILDER_NAME

    if ImageStore().find(BUILDER_NAME) is not None:
        return Check("dockerfiles", "ok", f"the image of builder VMs is there: {BUILDER_NAME}")
    try:
        which("mmdebstrap", "")
    except DayflyError:
        fix = "install the package mmdebstrap, or give `image:` in the build settings (docs/builds.md)"
        return Check("dockerfiles", "warn", "the image of builder VMs is not there and cannot be made", fix)
    return Check("dockerfiles", "ok", "the image of builder VMs is made at first use")


def _kernel(settings: QemuSettings) -> Check:
    kernel = find_kernel(settings.kernel, settings.cache)
    modules = {m.name for m in load_modules(kernel.modules)}
    if modules and not {"virtio_mmio", "squashfs", "overlay"} & modules:
        return Check("kernel", "warn", f"{kernel.image}, without modules", "use a distribution's cloud kernel")
    return Check("kernel", "ok", f"{kernel.image}, {len(modules)} modules")


def _agent(settings: QemuSettings) -> Check:
    binary = agent_binary(settings.architecture)
    return Check("guest agent", "ok", f"{binary.name}, {binary.stat().st_size // 1024} KiB")


def _kvm(settings: QemuSettings) -> Check:
    """Without KVM everything works, slower and with less isolation: a warning."""
    probe = probe_kvm(settings, fresh=True)
    return Check("kvm", "ok" if probe.works else "warn", probe.detail, "" if probe.works else KVM_FIX)


KVM_FIX = "give the user access to /dev/kvm (group kvm), or use a host whose KVM runs guests; TCG is used meanwhile"


def _isolation(settings: QemuSettings) -> Check:
    if choose_accelerator(settings) == "kvm":
        return Check("isolation", "ok", KVM_PROMISE)
    return Check("isolation", "warn", TCG_PROMISE, "`--require-isolation kvm` refuses to run like this")


def _user_namespaces(_: QemuSettings) -> Check:
    """Confinement itself: the innermost program sees its own namespaces, no capability and no network."""
    launchers = find_launchers()
    identity = ["--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = run(
        [
            *(launchers.setpriv, "--no-new-privs", *identity),
            *(launchers.bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc"),
            *("cat", "/proc/self/status", "/proc/self/net/dev"),
        ],
        timeout_s=PROBE_TIMEOUT_S,
        check=False,
    )
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        return Check(
            "user namespaces",
            "fail",
            "a confined process cannot be started: " + done.stderr.decode("utf-8", "replace").strip()[-200:],
            "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces, or an AppArmor profile for bwrap)",
        )
    wrong = list(_not_confined(said))
    if wrong:
        return Check("user namespaces", "fail", "a confined process " + ", ".join(wrong))
    return Check("user namespaces", "ok", "a confined process has no capability, no new privileges, no network")


def _not_confined(said: str) -> Iterator[str]:
    if "CapEff:\t0000000000000000" not in said:
        yield "still has capabilities"
    if "NoNewPrivs:\t1" not in said:
        yield "could gain privileges"
    devices = re.findall(r"^\s*(\S+):(?:\s+\d+){10,}$", said, re.MULTILINE)
    if devices != ["lo"]:
        yield f"sees network devices: {', '.join(devices) or 'none at all'}"


def _memory(_: QemuSettings) -> Check:
    free = psutil.virtual_memory().available
    status: Status = "ok" if free >= MIN_FREE_MEMORY else "warn"
    return Check("memory", status, f"{free / 1024**3:.1f} GiB available", "" if status == "ok" else "free memory")


def _disk_space(settings: QemuSettings) -> Check:
    folder = settings.cache
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    status: Status = "ok" if free >= MIN_FREE_DISK else "warn"
    fix = "" if status == "ok" else "`dayfly gc`, `dayfly image prune`, `dayfly template prune`"
    return Check("disk space", status, f"{free / 1024**3:.1f} GiB free at {folder}", fix)


def _cache_folder(settings: QemuSettings) -> Check:
    folder = settings.cache
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".doctor-{os.getpid()}"
    probe.write_bytes(b"")
    probe.unlink()
    return Check("cache folder", "ok", str(folder))


def _sqlite(_: QemuSettings) -> Check:
    return Check("sqlite", "ok", f"SQLite {sqlite3.sqlite_version}, used with its rollback journal")
