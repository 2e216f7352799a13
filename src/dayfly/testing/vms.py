"""What every hypervisor must do, and its VMs: `check_hypervisor`, or `HYPERVISOR_CHECKS` one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from dayfly.errors import GuestLost, GuestRefused, LimitError, SandboxOom
from dayfly.evidence import new_rollout_id
from dayfly.model import Disk, EntryMeta, Machine
from dayfly.protocols import Hypervisor, StartOptions, TransferLimits, Vm
from dayfly.testing.samples import expect, refused

CHECK_TIMEOUT_S = 300.0
"""For one check. Emulated guests on a busy host are slow; a check that hangs must still end."""
LIFETIME_S = 10.0
"""For the check of a VM's hard limit: enough to start and to be given one command."""
GONE_TIMEOUT_S = 10.0
PLACE = "/contract"
VERIFIER_FOLDERS = ("/tests", "/logs/verifier")


@dataclass(frozen=True)
class Programs:
    """How a script of a guest says a few simple things. `{0}` and `{1}` are plain words."""

    first_line: str
    say: str
    show: str
    """Print the environment variable `{0}`."""
    where: str
    echo_input: str
    write: str
    """Write `{1}` and a newline to the file `{0}`."""
    append: str
    sleep: str
    use_up_memory: str
    exit: str

    def script(self, *statements: str) -> bytes:
        return "\n".join([self.first_line, *statements, ""]).encode()


SHELL = Programs(
    first_line="#!/bin/sh",
    say="echo '{0}'",
    show='echo "${0}"',
    where="pwd",
    echo_input="cat",
    write="echo '{1}' > '{0}'",
    append="echo '{1}' >> '{0}'",
    sleep="sleep {0}",
    use_up_memory="tail /dev/zero",
    exit="exit {0}",
)
"""For an image with a shell and coreutils (or busybox)."""

FAKE = Programs(
    first_line="#!fake",
    say="print {0}",
    show="env {0}",
    where="pwd",
    echo_input="cat",
    write="write {0} {1}",
    append="append {0} {1}",
    sleep="sleep {0}",
    use_up_memory="oom",
    exit="exit {0}",
)
"""For `FakeHypervisor`."""


Running = Callable[[Set[str]], int]
"""Ids of VMs → how many of these are there, seen from outside: processes, not the hypervisor's own word."""


@dataclass
class Bench:
    """What the checks work with."""

    hypervisor: Hypervisor
    disk: Disk
    machine: Machine
    folder: Path
    """On the host, for disks and fetched files."""
    programs: Programs = SHELL
    running: Running | None = None
    """Counts what is left; None: not checked."""
    lifetime_s: float = LIFETIME_S
    ids: set[str] = field(default_factory=set)
    """Of every VM that was asked for."""
    _fetched: int = field(default=0, repr=False)

    def options(self, **changes: Any) -> StartOptions:
        vm_id = new_rollout_id()
        given: dict[str, Any] = {"vm_id": vm_id, "writable": self.folder / f"{vm_id}.img", "workdir": "/"}
        options = StartOptions(**{**given, **changes})
        self.ids.add(options.vm_id)
        return options

    @asynccontextmanager
    async def vm(self, **changes: Any) -> AsyncIterator[Vm]:
        async with self.hypervisor.start(self.disk, self.machine, self.options(**changes)) as vm:
            yield vm

    async def bring(self, vm: Vm, name: str, *statements: str, **put: Any) -> str:
        """Put a script into the guest; returns its path there."""
        path = f"{PLACE}/{name}"
        await vm.put(self.programs.script(*statements), path, mode=0o755, **put)
        return path

    async def read(self, vm: Vm, path: str, **get: Any) -> bytes | None:
        """A file of the guest, or None."""
        self._fetched += 1
        copy = self.folder / f"fetched-{self._fetched}"
        try:
            await vm.get(path, copy, **get)
        except GuestRefused as error:
            if error.cause == "not_found":
                return None
            raise
        return copy.read_bytes()

    def expect_nothing_left(self, when: str) -> None:
        if self.running is not None:
            left = self.running(self.ids)
            expect(left == 0, f"{left} VM(s) are there {when}")


Check = Callable[[Bench], Awaitable[None]]


async def check_hypervisor(
    hypervisor: Hypervisor,
    disk: Disk,
    machine: Machine,
    folder: Path,
    *,
    programs: Programs = SHELL,
    running: Running | None = None,
    lifetime_s: float = LIFETIME_S,
) -> None:
    """Run every check. Raises `AssertionError` with a sentence for the first rule that does not hold.

    `machine` should be small, as one check uses up its memory; `folder` is for disks and fetched files.
    """
    bench = Bench(hypervisor, disk, machine, folder, programs, running, lifetime_s)
    for check in HYPERVISOR_CHECKS:
        await run_check(check, bench)


async def run_check(check: Check, bench: Bench) -> None:
    """One check within its time, and nothing left behind after it."""
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S):
            await check(bench)
    except TimeoutError as error:
        raise AssertionError(f"{check.__name__} did not end within {CHECK_TIMEOUT_S:g} s") from error
    bench.expect_nothing_left(f"after {check.__name__}")


# --- starting -------------------------------------------------------------------------------------


async def says_what_it_is(bench: Bench) -> None:
    options = bench.options()
    first = await bench.hypervisor.prepare(bench.machine)
    expect(first == await bench.hypervisor.prepare(bench.machine), "preparing twice gives two templates")
    async with bench.hypervisor.start(bench.disk, bench.machine, options) as vm:
        expect(vm.info.id == options.vm_id, "VmInfo.id is not the id that was asked for")
        expect(
            vm.info.isolation == bench.hypervisor.isolation, "VM and hypervisor name different isolation classes"
        )
        if bench.running is not None:
            expect(bench.running({vm.info.id}) > 0, "a VM that runs is not among those counted from outside")
        if vm.info.how == "fork":
            expect(vm.info.template == first, "VmInfo.template is not what prepare() returned")
        stats = await vm.stats()
        expect(stats.oom_kills == 0, "a fresh VM reports kills for memory")
        expect(0 < stats.disk_free_bytes <= stats.disk_size_bytes, "a fresh VM has no free disk")
        cap = bench.machine.storage_mib << 20
        if bench.hypervisor.isolation != "fake":
            expect(stats.disk_size_bytes <= cap, f"the disk of {stats.disk_size_bytes} bytes is over its cap {cap}")


async def starts_afresh_and_equal(bench: Bench) -> None:
    async with bench.vm() as one, bench.vm() as two:
        expect(await one.changes() == await two.changes(), "two fresh VMs do not start from the same files")
        await one.put(b"mine", f"{PLACE}/mine")
        expect(await bench.read(two, f"{PLACE}/mine") is None, "a file written in one VM is seen in another")
    async with bench.vm() as three:
        expect(await bench.read(three, f"{PLACE}/mine") is None, "a fresh VM has a file of an earlier one")


async def carries_the_writable_disk_to_the_next_vm(bench: Bench) -> None:
    options = bench.options()
    async with bench.hypervisor.start(bench.disk, bench.machine, options) as vm:
        await vm.put(b"kept", f"{PLACE}/kept", mode=0o640)
        await vm.stop()
    async with bench.vm(writable=options.writable) as after:
        expect(await bench.read(after, f"{PLACE}/kept") == b"kept", "the next VM on a disk has lost a file of it")
        change = {c.path: c for c in await after.changes()}.get(f"{PLACE}/kept")
        expect(change is not None and change.mode & 0o777 == 0o640, "the next VM does not see the file's mode")


async def stops_twice_and_then_refuses(bench: Bench) -> None:
    async with bench.vm() as vm:
        script = await bench.bring(vm, "hello", bench.programs.say.format("hello"))
        await vm.stop()
        await vm.stop()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "exec": lambda: vm.exec([script]),
            "put": lambda: vm.put(b"", f"{PLACE}/late"),
            "get": lambda: vm.get(script, bench.folder / "late"),
            "remove": lambda: vm.remove(script),
            "changes": vm.changes,
            "stats": vm.stats,
            "freeze": vm.freeze,
            "open_verifier_space": lambda: vm.open_verifier_space(VERIFIER_FOLDERS),
        }
        for name, call in calls.items():
            with refused(GuestLost, f"{name} on a stopped VM does not raise GuestLost"):
                await call()
    await vm.stop()


async def stop_ends_a_call_that_is_under_way(bench: Bench) -> None:
    p = bench.programs
    async with bench.vm() as vm:
        script = await bench.bring(vm, "long", p.say.format("begun"), p.sleep.format(600))
        begun = anyio.Event()

        async def stop() -> None:
            await begun.wait()
            await vm.stop()

        async with anyio.create_task_group() as group:
            group.start_soon(stop)
            with refused(GuestLost, "a call that is under way when the VM stops does not raise GuestLost"):
                await vm.exec([script], stdout=lambda chunk: begun.set())


async def ends_with_its_lifetime(bench: Bench) -> None:
    """Fault 37: whatever becomes of its owner, a VM does not live for ever."""
    p = bench.programs
    options = bench.options(lifetime_s=bench.lifetime_s)
    async with bench.hypervisor.start(bench.disk, bench.machine, options) as vm:
        script = await bench.bring(vm, "long", p.sleep.format(600))
        with refused(GuestLost, f"a VM outlives its lifetime of {bench.lifetime_s:g} s"):
            await vm.exec([script], timeout_s=CHECK_TIMEOUT_S / 2)
        await _seen_gone(bench, options.vm_id)


async def _seen_gone(bench: Bench, vm_id: str) -> None:
    """A dying process closes its sockets, by which its loss is known, a moment before it is gone."""
    deadline = anyio.current_time() + GONE_TIMEOUT_S
    while anyio.current_time() < deadline:
        if bench.running is None or bench.running({vm_id}) == 0:
            return
        await anyio.sleep(0.02)
    raise AssertionError("a VM is there although its lifetime is over")


async def leaves_nothing_when_cancelled(bench: Bench) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with bench.vm():
            pass
    bench.expect_nothing_left("after a start that was cancelled before it began")
    with anyio.move_on_after(0.05):
        async with bench.vm():
            await anyio.sleep_forever()
    bench.expect_nothing_left("after a cancelled start")
    p = bench.programs
    async with anyio.create_task_group() as group:
        async with bench.vm() as vm:
            script = await bench.bring(vm, "long", p.say.format("begun"), p.sleep.format(600))
            await vm.exec([script], stdout=lambda chunk: group.cancel_scope.cancel())
    expect(group.cancel_scope.cancelled_caught, "a cancelled exec went on to its end")
    bench.expect_nothing_left("after a cancelled command")


async def an_error_inside_passes_through(bench: Bench) -> None:
    with refused(ZeroDivisionError, "an error of the user of a VM is swallowed or changed"):
        async with bench.vm():
            raise ZeroDivisionError


# --- programs -------------------------------------------------------------------------------------


async def reports_status_and_output(bench: Bench) -> None:
    p, seen = bench.programs, bytearray()
    async with bench.vm() as vm:
        script = await bench.bring(vm, "seven", p.say.format("one"), p.say.format("two"), p.exit.format(7))
        result = await vm.exec([script], stdout=seen.extend)
        expect(result.exit_code == 7 and result.signal is None, "the exit status 7 is not reported as 7")
        expect(not result.ok and not result.timed_out and not result.oom_killed, "an ordinary end is not ordinary")
        expect(result.stdout.data == b"one\ntwo\n", f"the output is {result.stdout.data!r}")
        expect(bytes(seen) == b"one\ntwo\n", "the sink did not get every byte")


async def keeps_both_ends_of_much_output(bench: Bench) -> None:
    p, seen = bench.programs, bytearray()
    lines = [f"{number:06d}{'x' * 93}" for number in range(2500)]
    whole = "".join(f"{line}\n" for line in lines).encode()
    async with bench.vm() as vm:
        script = await bench.bring(vm, "much", *(p.say.format(line) for line in lines))
        captured = (await vm.exec([script], stdout=seen.extend)).stdout
    expect(bytes(seen) == whole, "the sink did not get every byte of a long output")
    expect(captured.head + captured.tail != b"" and captured.total == len(whole), "bytes are not accounted for")
    expect(whole.startswith(captured.head) and whole.endswith(captured.tail), "the kept output is not its two ends")
    expect(len(captured.head) + len(captured.tail) <= 128 * 1024, "more than 128 KiB of output are kept in memory")


async def gives_environment_folder_and_input(bench: Bench) -> None:
    p = bench.programs
    async with bench.vm(env={"OF_VM": "vm", "BOTH": "vm"}, workdir=PLACE) as vm:
        names = ("OF_VM", "BOTH", "OF_CALL")
        script = await bench.bring(vm, "show", *(p.show.format(n) for n in names), p.where, p.echo_input)
        result = await vm.exec([script], env={"BOTH": "call", "OF_CALL": "call"}, stdin=b"input\0\xff")
        wanted = f"vm\ncall\ncall\n{PLACE}\n".encode() + b"input\0\xff"
        expect(result.stdout.data == wanted, f"environment, folder or input are wrong: {result.stdout.data!r}")
        elsewhere = await vm.exec([script], cwd="/", stdin=b"")
        expect(elsewhere.stdout.data.endswith(b"\n/\n"), "cwd is not obeyed, or an empty input is not empty")


async def a_timeout_keeps_the_output(bench: Bench) -> None:
    p = bench.programs
    async with bench.vm() as vm:
        script = await bench.bring(vm, "slow", p.say.format("begun"), p.sleep.format(600), p.say.format("late"))
        result = await vm.exec([script], timeout_s=2.0)
        expect(result.timed_out and not result.ok, "a program over its limit is not reported as timed out")
        expect(result.stdout.data == b"begun\n", f"the output at a timeout is {result.stdout.data!r}")
        again = await bench.bring(vm, "quick", p.say.format("alive"))
        expect((await vm.exec([again])).ok, "after a timeout the VM is of no use")


async def refuses_what_cannot_start(bench: Bench) -> None:
    p = bench.programs
    async with bench.vm() as vm:
        script = await bench.bring(vm, "mark", p.write.format(f"{PLACE}/ran", "yes"))
        with refused(GuestRefused, "a program that is not there does not raise GuestRefused", cause="not_found"):
            await vm.exec(["/no/such/program"])
        with refused(LimitError, "an argument of 300 kB does not raise LimitError"):
            await vm.exec([script, "x" * 300_000])
        with refused(LimitError, "an environment value of 300 kB does not raise LimitError"):
            await vm.exec([script], env={"LONG": "x" * 300_000})
        expect(await bench.read(vm, f"{PLACE}/ran") is None, "the program was started before it was refused")
        expect((await vm.exec([script])).ok, "after a refusal the VM is of no use")


async def reports_want_of_memory(bench: Bench) -> None:
    async with bench.vm() as vm:
        script = await bench.bring(vm, "hungry", bench.programs.use_up_memory)
        try:
            result = await vm.exec([script], timeout_s=CHECK_TIMEOUT_S / 2)
            kills = (await vm.stats()).oom_kills
        except SandboxOom:
            return
        expect(not result.ok, "a program that used up the memory ended well")
        expect(kills > 0, "a kill for want of memory is not counted in the stats")


async def freezes_and_thaws(bench: Bench) -> None:
    p = bench.programs
    steps = [s for _ in range(2000) for s in (p.append.format(f"{PLACE}/ticks", "x"), p.sleep.format(0.1))]
    async with bench.vm() as vm, anyio.create_task_group() as group:
        script = await bench.bring(vm, "ticking", *steps)
        group.start_soon(lambda: vm.exec([script]))
        before = await _more_than(bench, vm, 0)
        await vm.freeze()
        await vm.freeze()
        frozen = len(await bench.read(vm, f"{PLACE}/ticks") or b"")
        await anyio.sleep(1)
        still = len(await bench.read(vm, f"{PLACE}/ticks") or b"")
        expect(still == frozen >= before, f"a frozen program went on, from {frozen} to {still} bytes")
        await vm.thaw()
        await _more_than(bench, vm, still)
        group.cancel_scope.cancel()


async def _more_than(bench: Bench, vm: Vm, size: int) -> int:
    while True:
        now = len(await bench.read(vm, f"{PLACE}/ticks") or b"")
        if now > size:
            return now
        await anyio.sleep(0.1)


# --- files ----------------------------------------------------------------------------------------


async def carries_files_both_ways(bench: Bench) -> None:
    source, back = bench.folder / "source", bench.folder / "back"
    names = ["plain", "with space", "sub/deep/er", "ünï", "-rf"]
    for number, name in enumerate(names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(bytes([number, 0, 255]) * 1000)
    (source / "plain").chmod(0o755)
    (source / "left-out").write_bytes(b"")
    async with bench.vm() as vm:
        await vm.put(b"there before", f"{PLACE}/in/other")
        sent = await vm.put(source, f"{PLACE}/in", exclude=lambda name: name == "left-out")
        expect("left-out" in sent.skipped, "an excluded file is not named as skipped")
        expect(sent.digest.startswith("sha256:"), "put gives no digest")
        expect(await bench.read(vm, f"{PLACE}/in/other") == b"there before", "a folder is not merged but replaced")
        expect(await bench.read(vm, f"{PLACE}/in/left-out") is None, "an excluded file was carried")
        await vm.remove(f"{PLACE}/in/other")
        got = await vm.get(f"{PLACE}/in", back, exclude=lambda name: name == "-rf")
    for name in names:
        if name != "-rf":
            expect((back / name).read_bytes() == (source / name).read_bytes(), f"{name!r} came back changed")
    expect(not (back / "-rf").exists() and "-rf" in got.skipped, "an excluded file was fetched")
    expect(got.entries["plain"].mode & 0o777 == 0o755, "the mode of a fetched file is not reported")
    expect((back / "plain").stat().st_mode & 0o077 == 0, "a fetched file is not private on the host")


async def restores_mode_and_owner(bench: Bench) -> None:
    source = bench.folder / "owned"
    source.mkdir()
    (source / "file").write_bytes(b"x")
    wanted = EntryMeta(mode=0o640, uid=1234, gid=4321)
    async with bench.vm() as vm:
        await vm.put(source, f"{PLACE}/owned", meta={"file": wanted})
        got = await vm.get(f"{PLACE}/owned", bench.folder / "owned-back")
        expect(got.entries["file"] == wanted, f"mode and owner came back as {got.entries['file']}")


async def bounds_what_comes_out(bench: Bench) -> None:
    async with bench.vm() as vm:
        for number in range(5):
            await vm.put(b"x" * 1000, f"{PLACE}/many/{number}")
        for limits in (TransferLimits(files=4), TransferLimits(bytes=4999), TransferLimits(file_bytes=999)):
            with refused(LimitError, f"a transfer over {limits} does not raise LimitError"):
                await vm.get(f"{PLACE}/many", bench.folder / new_rollout_id(), limits=limits)
        with refused(GuestRefused, "fetching what is not there does not raise GuestRefused", cause="not_found"):
            await vm.get(f"{PLACE}/absent", bench.folder / "absent")
        await vm.get(f"{PLACE}/many", bench.folder / "all-five", limits=TransferLimits(files=20, bytes=100_000))


async def lists_changes(bench: Bench) -> None:
    async with bench.vm() as vm:
        before = set(await vm.changes())
        await vm.put(b"abc", f"{PLACE}/b", mode=0o600)
        await vm.put(b"", f"{PLACE}/a")
        await vm.put(b"", f"{PLACE}/gone/file")
        await vm.remove(f"{PLACE}/gone")
        await vm.remove(f"{PLACE}/gone")
        everything = await vm.changes()
        expect([c.path for c in everything] == sorted(c.path for c in everything), "changes are not sorted by path")
        new = {c.path: c for c in everything if c not in before}
        one = new.get(f"{PLACE}/b")
        expect(one is not None, "a new file is not among the changes")
        assert one is not None
        expect((one.kind, one.size, one.mode & 0o777) == ("file", 3, 0o600), f"a new file is listed as {one}")
        abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        expect(one.digest == abc, "the digest of a changed file is not sha256 of its content")
        expect(
            not any(p.startswith(f"{PLACE}/gone") for p in new), "a file that came and went is among the changes"
        )


# --- the verifier's space -------------------------------------------------------------------------


async def the_verifier_space_is_out_of_reach(bench: Bench) -> None:
    p = bench.programs
    async with bench.vm() as vm:
        with refused(GuestRefused, "the verifier space is there before it was opened"):
            await vm.put(b"", "/tests/early", space="verify")
        await vm.put(b"work", f"{PLACE}/work")
        await vm.freeze()
        planted = await vm.open_verifier_space(VERIFIER_FOLDERS)
        expect(planted == (), f"in a clean guest {planted} are called planted")
        with refused(GuestRefused, "the verifier space can be opened twice"):
            await vm.open_verifier_space(VERIFIER_FOLDERS)
        judge = p.script(p.write.format("/logs/verifier/reward.txt", "1"), p.say.format("judged"))
        await vm.put(judge, "/tests/judge", mode=0o755, space="verify")
        result = await vm.exec(["/tests/judge"], space="verify", timeout_s=60)
        expect(result.stdout.data == b"judged\n" and result.ok, "a judge does not run while work is frozen")
        reward = await bench.read(vm, "/logs/verifier/reward.txt", space="verify")
        expect(reward == b"1\n", f"the verdict reads {reward!r}")
        expect(
            await bench.read(vm, f"{PLACE}/work", space="verify") == b"work", "the verifier does not see the work"
        )
        for path in ("/tests/judge", "/logs/verifier/reward.txt"):
            expect(await bench.read(vm, path) is None, f"{path} is seen outside of the verifier space")
        await vm.thaw()
        late = await bench.bring(vm, "late", p.write.format("/logs/verifier/reward.txt", "0"))
        await vm.exec([late])
        reward = await bench.read(vm, "/logs/verifier/reward.txt", space="verify")
        expect(reward == b"1\n", "a process of the work reached the verdict")
        for folder in VERIFIER_FOLDERS:
            await vm.remove(folder, space="verify")
        for path in ("/tests/judge", "/logs/verifier/reward.txt"):
            expect(await bench.read(vm, path, space="verify") is None, f"{path} is there after it was removed")
        await vm.put(judge, "/tests/judge", mode=0o755, space="verify")
        result = await vm.exec(["/tests/judge"], space="verify", timeout_s=60)
        expect(result.ok, "a judge does not run in a space that was emptied")


async def reports_what_is_planted(bench: Bench) -> None:
    async with bench.vm() as vm:
        await vm.put(b"1", "/logs/verifier/reward.txt")
        await vm.put(b"", "/tests/sub/planted")
        await vm.freeze()
        planted = await vm.open_verifier_space(VERIFIER_FOLDERS)
        for path in ("/logs/verifier", "/tests"):
            expect(
                any(p == path or p.startswith(path + "/") for p in planted), f"what was in {path} is not reported"
            )
        reward = await bench.read(vm, "/logs/verifier/reward.txt", space="verify")
        expect(reward is None, "a planted verdict is seen in the verifier space")


async def refuses_a_port_where_nobody_listens(bench: Bench) -> None:
    async with bench.vm() as vm:
        try:
            async with vm.forward(9) as stream:
                await stream.receive()
        except (GuestRefused, anyio.EndOfStream, anyio.BrokenResourceError):
            return
        raise AssertionError("a port where nobody listens gave bytes")


HYPERVISOR_CHECKS: tuple[Check, ...] = (
    says_what_it_is,
    starts_afresh_and_equal,
    carries_the_writable_disk_to_the_next_vm,
    stops_twice_and_then_refuses,
    stop_ends_a_call_that_is_under_way,
    ends_with_its_lifetime,
    leaves_nothing_when_cancelled,
    an_error_inside_passes_through,
    reports_status_and_output,
    keeps_both_ends_of_much_output,
    gives_environment_folder_and_input,
    a_timeout_keeps_the_output,
    refuses_what_cannot_start,
    reports_want_of_memory,
    freezes_and_thaws,
    carries_files_both_ways,
    restores_mode_and_owner,
    bounds_what_comes_out,
    lists_changes,
    the_verifier_space_is_out_of_reach,
    reports_what_is_planted,
    refuses_a_port_where_nobody_listens,
)
