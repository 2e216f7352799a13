"""One build inside a builder VM: everything that a Dockerfile runs, runs there.

The guest gets the Dockerfile, the context and the secrets over its channel, its base images on its own read-only
disk, and a way out through a proxy that the host controls. It gives back one OCI layout.
"""

from __future__ import annotations

import secrets as random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc

from dayfly.errors import GuestLost, GuestRefused, ImageError, SandboxOom
from dayfly.images.builder.blame import failed, timed_out
from dayfly.images.builder.kept import KeptLayers
from dayfly.images.builder.log import BuildLog
from dayfly.images.builder.proxy import Proxy
from dayfly.images.builder.relay import HOST as HOST_PORT
from dayfly.images.builder.relay import PROGRAMS as PROXY_PORT
from dayfly.images.builder.request import BuildPlan
from dayfly.images.builder.settings import BuildSettings
from dayfly.model import Disk, ExecResult, Machine
from dayfly.protocols import Hypervisor, StartOptions, TransferLimits, Vm

PREPARE_TIMEOUT_S = 60.0
HAND_OVER_TIMEOUT_S = 900.0
"""Packing the image and bringing it to the host, which is our time and not the Dockerfile's."""
WAITING_CONNECTIONS = 6
"""Host connections that wait for a program in the guest."""
BUILT = "localhost/dayfly-built:latest"

PREPARE = r"""
set -eu
mount -t tmpfs -o mode=700,size=1m disks /mnt
for block in /sys/block/vd*; do
    number=$(cat "$block/dev")
    mknod "/mnt/$(cat "$block/serial")" b "${number%:*}" "${number#*:}"
done
mkdir /mnt/b /mnt/w
mount -t squashfs -o ro,nodev /mnt/base /mnt/b
mount -t ext4 -o nodev /mnt/work /mnt/w
mkdir -p /mnt/w/containers /var/lib/containers /bases /etc/containers /build/out/blobs/sha256 /run/dayfly
mount --bind /mnt/w/containers /var/lib/containers
mount --bind /mnt/b/bases /bases
umount /mnt/w /mnt/b
umount /mnt
mkdir /run/dayfly/secrets /dev/dayfly
mount -t tmpfs -o mode=700,size=16m secrets /run/dayfly/secrets
mount -t tmpfs -o mode=755,size=64m dayfly /dev/dayfly
"""
"""Give buildah real file systems to work on: overlayfs cannot have its upper layer on another overlayfs. The two
block devices are known by the serial numbers that the hypervisor gives them."""

CLEAN = r"""
set -eu
mount -t tmpfs -o mode=700,size=1m disks /mnt
for block in /sys/block/vd*; do
    [ "$(cat "$block/serial")" = work ] || continue
    number=$(cat "$block/dev")
    mknod /mnt/work b "${number%:*}" "${number#*:}"
done
mkdir /mnt/w
mount -t ext4 -o nodev /mnt/work /mnt/w
cd /mnt/w/upper
rm -rf ./* ./.[!.]*
sync
"""
"""Take away what the VM wrote apart from layers: with the next start it would be there again. The last thing that
is run in a VM, because it pulls the root file system from under it."""

STORAGE = """\
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
[storage.options]
additionalimagestores = ["/bases"]
"""
REGISTRIES = 'unqualified-search-registries = ["docker.io"]\nshort-name-mode = "permissive"\n'
POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}\n'


async def build_in_vm(
    plan: BuildPlan,
    settings: BuildSettings,
    hypervisor: Hypervisor,
    disk: Disk,
    proxy: Proxy | None,
    work: Path,
    log: BuildLog,
    layers: KeptLayers | None = None,
) -> Path:
    """Build `plan` in a fresh VM; returns the OCI layout, in `work`, as the guest made it: not yet trusted.

    Raises `ImageError` (`build_failed`, `build_timeout`, `builder_lost`), and `BootError`.
    """
    options = StartOptions(
        vm_id=f"build-{plan.key[:8]}-{random.token_hex(3)}",
        writable=work / "disk.img",
        hostname="builder",
        lifetime_s=plan.request.timeout_s + PREPARE_TIMEOUT_S + HAND_OVER_TIMEOUT_S + 120,
        console=work / "console.log",
        privileged=True,
    )
    async with AsyncExitStack() as stack:
        if layers is not None:
            layers.move_to(options.writable)
        vm = await stack.enter_async_context(hypervisor.start(disk, settings.machine, options))
        try:
            with anyio.fail_after(PREPARE_TIMEOUT_S + plan.request.timeout_s):
                await _prepare(vm, plan, settings)
                async with _way_out(vm, proxy):
                    result = await vm.exec(
                        build_command(plan, layers=layers is not None),
                        env=_environment(proxy),
                        timeout_s=plan.request.timeout_s,
                        stdout=log.add,
                        stderr=log.add,
                        leave_children=False,
                    )
            if not result.ok:
                failure = await _failure(vm, plan, settings.machine, result, log)
                await _keep(vm, layers, options.writable)
                raise failure
            with anyio.fail_after(HAND_OVER_TIMEOUT_S):
                made = await _hand_over(vm, plan, settings.machine, work, log)
                await _keep(vm, layers, options.writable)
                return made
        except TimeoutError:
            raise timed_out(plan, log) from None
        except GuestRefused as error:
            if error.cause == "not_gone":  # its time was over, and it was too many to be killed at once
                raise timed_out(plan, log) from error
            raise ImageError(
                f"the builder VM refused: {error.message}", hint=error.hint, cause="builder"
            ) from error


async def _keep(vm: Vm, layers: KeptLayers | None, disk: Path) -> None:
    """Put the disk of a build that came to an end aside, without what is not layers."""
    if layers is None:
        return
    cleaned = await vm.exec(["/bin/sh", "-c", CLEAN], user="root", timeout_s=PREPARE_TIMEOUT_S)
    await vm.stop()
    if cleaned.ok:
        layers.take(disk)


def build_command(plan: BuildPlan, *, layers: bool = False) -> list[str]:
    """buildah's command line, in the guest."""
    argv = ["buildah", "bud", "--isolation=chroot", "--pull=never", "--identity-label=false"]
    argv += [f"--layers={'true' if layers else 'false'}"]
    argv += ["--file=/build/Dockerfile", "--ignorefile=/build/ignore", f"--tag={BUILT}"]
    argv += [f"--build-arg={name}={value}" for name, value in plan.request.args.items()]
    # --env puts an ENV after each FROM, so that RUN has it; --unsetenv leaves it out of the image.
    argv += [word for name, value in plan.env.items() for word in (f"--env={name}={value}", f"--unsetenv={name}")]
    argv += [f"--secret=id={name},src=/run/dayfly/secrets/{n}" for n, name in enumerate(plan.secrets)]
    argv += [f"--target={plan.request.target}"] if plan.request.target else []
    return [*argv, "/build/context"]


def _environment(proxy: Proxy | None) -> dict[str, str]:
    """buildah passes proxies on to RUN and leaves them out of the image."""
    if proxy is None:
        return {}
    url = f"http://127.0.0.1:{PROXY_PORT}"
    none = "localhost,127.0.0.1,::1"
    return {name: url for n in ("http_proxy", "https_proxy", "ftp_proxy") for name in (n, n.upper())} | {
        "no_proxy": none,
        "NO_PROXY": none,
    }


async def _prepare(vm: Vm, plan: BuildPlan, settings: BuildSettings) -> None:
    made = await vm.exec(["/bin/sh", "-c", PREPARE], user="root", timeout_s=PREPARE_TIMEOUT_S)
    if not made.ok:
        raise ImageError(
            f"the builder VM cannot be prepared: {made.stderr.text.strip()[-300:]}",
            hint="is the builder image fit? it needs buildah, util-linux and python3; see docs/builds.md",
            cause="builder",
        )
    texts = {
        "/etc/containers/storage.conf": STORAGE,
        "/etc/containers/registries.conf": REGISTRIES,
        "/etc/containers/policy.json": POLICY,
        "/build/ignore": "",
    }
    for path, text in texts.items():
        await vm.put(text.encode(), path, mode=0o644)
    await vm.put(plan.text, "/build/Dockerfile", mode=0o644)
    for name, file in settings.files.items():
        await vm.put(file, f"/dev/dayfly/{name}", mode=0o644)
    for number, content in enumerate(plan.secrets.values()):
        await vm.put(content, f"/run/dayfly/secrets/{number}", mode=0o400)
    for base in plan.bases:  # so that buildah sees no need to hand the base itself over
        await vm.put(b"", f"/build/out/blobs/sha256/{base.mark.removeprefix('sha256:')}", mode=0o644)
    context = plan.context
    await vm.put(context.folder, "/build/context", exclude=context.leaves_out, meta=context.meta)


# --- the way out ---------------------------------------------------------------------------------


@asynccontextmanager
async def _way_out(vm: Vm, proxy: Proxy | None) -> AsyncIterator[None]:
    """While the block runs, programs in the guest reach what `proxy` lets them."""
    if proxy is None:
        yield
        return
    source = Path(__file__).with_name("relay.py").read_bytes()
    await vm.put(source, "/run/dayfly/relay.py", mode=0o644)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            relay = _Relay()
            tasks.start_soon(relay.run, vm)
            await relay.wait_ready()
            for _ in range(WAITING_CONNECTIONS):
                tasks.start_soon(_wait_for_program, vm, proxy, tasks)
            yield
        except Exception as error:  # raised below, outside of the group that would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Relay:
    """The guest's end. A build that kills it has no network; that is its own affair."""

    def __init__(self) -> None:
        self._settled = anyio.Event()
        self._ready = False
        self._why = ""

    async def run(self, vm: Vm) -> None:
        try:
            result = await vm.exec(
                ["python3", "-I", "/run/dayfly/relay.py"], stdout=self._hear, leave_children=False
            )
            self._why = result.stderr.text.strip()[-300:]
        except (GuestRefused, GuestLost, SandboxOom) as error:
            self._why = error.message
        self._settled.set()

    def _hear(self, chunk: bytes) -> None:
        self._ready = True
        self._settled.set()

    async def wait_ready(self) -> None:
        await self._settled.wait()
        if not self._ready:
            raise ImageError(
                f"the relay in the builder VM did not start: {self._why}",
                hint="the builder image needs python3; or build with --network none",
                cause="builder",
            )


async def _wait_for_program(vm: Vm, proxy: Proxy, tasks: anyio.abc.TaskGroup) -> None:
    """Hold one connection to the relay; when a program is tied to it, another takes its place."""
    try:
        async with vm.forward(HOST_PORT) as stream:
            first = await stream.receive()
            tasks.start_soon(_wait_for_program, vm, proxy, tasks)
            await proxy.serve(stream, first)
    except (GuestRefused, GuestLost, SandboxOom, anyio.EndOfStream, anyio.BrokenResourceError):
        return
    except Exception as error:  # a fault with one connection ends that connection, not the build
        proxy.on_refused(f"a connection ended with {type(error).__name__}: {error}")


# --- the end -------------------------------------------------------------------------------------


async def _hand_over(vm: Vm, plan: BuildPlan, machine: Machine, work: Path, log: BuildLog) -> Path:
    """Have buildah write the image as an OCI layout, and fetch what is not the bases'."""
    pushed = await vm.exec(
        [
            "buildah",
            "push",
            "--quiet",
            "--compression-format=zstd",
            "--force-compression=false",
            BUILT,
            "oci:/build/out",
        ],
        timeout_s=HAND_OVER_TIMEOUT_S,
        stdout=log.add,
        stderr=log.add,
    )
    if not pushed.ok:
        raise await _failure(vm, plan, machine, pushed, log)
    size = machine.storage_mib * 1024 * 1024
    limits = TransferLimits(files=2000, bytes=size, file_bytes=size, depth=8)
    await vm.get("/build/out", work / "out", limits=limits)
    return work / "out"


async def _failure(vm: Vm, plan: BuildPlan, machine: Machine, result: ExecResult, log: BuildLog) -> ImageError:
    """Say which instruction failed, and whether it ran into a limit of the VM."""
    if result.timed_out:
        return timed_out(plan, log)
    stats = await vm.stats()
    full = stats.disk_size_bytes and stats.disk_free_bytes < 16 * 1024 * 1024
    if full or b"No space left on device" in log.tail:  # by now buildah may have cleaned up
        return failed(
            plan, log, f"the build filled the builder's {machine.storage_mib} MiB disk", "raise storage_mb"
        )
    if result.oom_killed or stats.oom_kills:
        return failed(
            plan, log, f"the build ran into the builder's {machine.memory_mib} MiB of memory", "raise memory_mb"
        )
    return failed(plan, log)
