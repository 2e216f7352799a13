"""Files into and out of a real VM: many, large, sparse, with any name; and hostile ones."""

from __future__ import annotations

import hashlib
import os
import resource

import pytest

from dayfly.errors import GuestRefused, LimitError
from dayfly.model import Machine
from dayfly.protocols import TransferLimits

pytestmark = pytest.mark.vm

ROOMY = Machine(memory_mib=512, storage_mib=2048)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tree(folder):
    """Relative name (bytes) → content, kind and the x bit."""
    found = {}
    for path, _, files in os.walk(os.fsencode(folder)):
        for name in files:
            full = os.path.join(path, name)
            key = os.path.relpath(full, os.fsencode(folder))
            if os.path.islink(full):
                found[key] = os.readlink(full)
            else:
                with open(full, "rb") as file:
                    found[key] = (file.read(), bool(os.stat(full).st_mode & 0o100))
    return found


def test_ten_thousand_files_and_any_name(in_vm, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(10_000):
        folder = source / f"d{number % 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(b"%d" % number * 100)
    odd = os.fsencode(source) + b"/odd"
    os.mkdir(odd)
    for name in (b"new\nline", b"\xff\xfe", "ünï".encode(), b" ", b"-rf", b"a" * 255, b"quote'\"`$(x)"):
        with open(odd + b"/" + name, "wb") as file:
            file.write(name)
    os.symlink("f1", os.fsencode(source) + b"/d1/link")
    (source / "d2/f2").chmod(0o755)

    async def work(vm):
        sent = await vm.put(source, "/app/in")
        count = await vm.exec(
            ["/bin/sh", "-c", "find /app/in -type f | wc -l; ls -l /app/in/d2/f2 /app/in/d1/link"]
        )
        got = await vm.get("/app/in", tmp_path / "out")
        return sent, count, got

    sent, _, got = in_vm(work, ROOMY)
    assert tree(tmp_path / "out") == tree(source)
    assert sent.files >= 10_007 and got.files >= 10_007


def test_a_sparse_gibibyte_with_bounded_memory(in_vm, tmp_path):
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.truncate(2**30)
        for offset in (0, 2**29, 2**30 - 5):
            file.seek(offset)
            file.write(b"datum")
    before = peak_mib()

    async def work(vm):
        await vm.put(source, "/app/sparse")
        usage = await vm.exec(["/usr/bin/stat", "-c", "%s %b", "/app/sparse"])
        await vm.get("/app/sparse", tmp_path / "back")
        return usage.stdout.text.split(), (await vm.stats()).memory_peak_bytes

    (size, blocks), guest_peak = in_vm(work, ROOMY)
    assert int(size) == 2**30 and int(blocks) * 512 < 2**22, "sparse in the guest"
    back = tmp_path / "back"
    assert back.stat().st_size == 2**30 and back.stat().st_blocks * 512 < 2**22, "sparse on the host"
    with source.open("rb") as one, back.open("rb") as other:
        for offset in (0, 2**29, 2**30 - 5):
            one.seek(offset)
            other.seek(offset)
            assert one.read(4096) == other.read(4096)
    assert peak_mib() - before < 64
    assert guest_peak < 400 * 2**20


def test_a_large_upload_does_not_ride_in_an_argument(in_vm, tmp_path):
    """Fault 17."""
    data = os.urandom(200 * 1024)

    async def work(vm):
        await vm.put(data, "/app/blob", mode=0o600)
        return await vm.exec(["/usr/bin/sha256sum", "/app/blob"])

    assert in_vm(work).stdout.text.split()[0] == hashlib.sha256(data).hexdigest()


def test_what_a_guest_sends_stays_where_it_belongs(in_vm, tmp_path):
    """Links out of the folder, devices, fifos and sockets: not carried, and said so."""
    outside = tmp_path / "outside"
    outside.write_text("untouched")

    async def work(vm):
        script = (
            "mkdir -p /app/t/sub; ln -s /etc/passwd /app/t/abs; ln -s ../../../../outside /app/t/up; "
            "ln -s sub /app/t/inside; mkfifo /app/t/fifo; echo ok > /app/t/sub/file; chmod 4755 /app/t/sub/file"
        )
        await vm.exec(["/bin/sh", "-c", script])
        return await vm.get("/app/t", tmp_path / "got")

    got = in_vm(work)
    assert (tmp_path / "got/sub/file").read_text() == "ok\n"
    assert not (tmp_path / "got/sub/file").stat().st_mode & 0o7000
    for name in ("abs", "up", "fifo"):
        assert not os.path.lexists(tmp_path / "got" / name)
        assert any(name in skipped for skipped in got.skipped)
    assert outside.read_text() == "untouched"


def test_transfers_are_capped(in_vm, tmp_path):
    async def work(vm):
        await vm.exec(["/bin/sh", "-c", "mkdir /app/m; for i in $(seq 50); do echo x > /app/m/$i; done"])
        with pytest.raises(LimitError):
            await vm.get("/app/m", tmp_path / "a", limits=TransferLimits(files=10))
        await vm.exec(["/bin/sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x > /app/big"])
        with pytest.raises(LimitError):
            await vm.get("/app/big", tmp_path / "b", limits=TransferLimits(bytes=1_000_000))
        with pytest.raises(GuestRefused) as caught:
            await vm.get("/app/none", tmp_path / "c")
        assert caught.value.cause == "not_found"
        return await vm.exec(["/bin/true"])

    assert in_vm(work).ok


def test_put_does_not_follow_what_the_agent_prepared(in_vm):
    async def work(vm):
        await vm.exec(["/bin/sh", "-c", "mkdir /victim; ln -s /victim /app/dest"])
        try:
            await vm.put(b"payload", "/app/dest/file")
        except GuestRefused:
            return b""
        return (await vm.exec(["/bin/ls", "/victim"])).stdout.data

    assert in_vm(work) in (b"", b"file\n")


def test_changes_and_removal(in_vm):
    async def work(vm):
        before = {c.path for c in await vm.changes()}
        await vm.exec(["/bin/sh", "-c", "echo x > /app/new; rm /etc/issue; mkdir /app/d; ln -s new /app/l"])
        changed = {c.path: c for c in await vm.changes() if c.path not in before}
        await vm.remove("/app/d")
        await vm.remove("/app/not-there")
        return changed, await vm.exec(["/usr/bin/test", "-e", "/app/d"])

    changed, there = in_vm(work)
    assert changed["/app/new"].kind == "file" and changed["/app/new"].digest.startswith("sha256:")
    assert changed["/etc/issue"].kind == "deleted"
    assert changed["/app/d"].kind == "dir" and changed["/app/l"].kind == "link"
    assert there.exit_code == 1
