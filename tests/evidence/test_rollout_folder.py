from __future__ import annotations

import os
import stat
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import DayflyError, HostError
from dayfly.evidence import RolloutFolder
from dayfly.evidence.rollout_folder import BoundedFile
from dayfly.protocols import Record


@pytest.fixture
def work(tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "work" / "r1", max_bytes=1000)


def fill(record: Record, name: str, chunks: list[bytes]) -> bytes:
    async def main() -> None:
        async with record.sink(name) as sink:
            for chunk in chunks:
                sink(chunk)

    anyio.run(main)
    return (record.folder / name).read_bytes()


def test_a_stream_up_to_its_cap_is_complete(work: RolloutFolder) -> None:
    assert fill(work, "agent/stdout.txt", [b"\xff", b"", b"a" * 998, b"\0"]) == b"\xff" + b"a" * 998 + b"\0"


def test_over_the_cap_both_ends_and_the_dropped_count_are_kept(work: RolloutFolder) -> None:
    data = b"".join(b"%07d\n" % n for n in range(2_500))  # 20,000 bytes
    kept = fill(work, "out", [data])
    assert kept == data[:500] + b"\n[... 19000 bytes dropped ...]\n" + data[-500:]


@given(st.lists(st.binary(max_size=60), max_size=40), st.integers(0, 200))
def test_bounded_file_is_right_for_every_split(chunks: list[bytes], cap: int) -> None:
    fd = os.memfd_create("stream")
    stream = BoundedFile(os.dup(fd), cap)
    for chunk in chunks:
        stream.write(chunk)
    data = b"".join(chunks)
    stream.close()
    stream.close()
    kept = os.pread(fd, 100_000, 0)
    os.close(fd)
    if len(data) <= cap:
        assert kept == data
    else:
        tail = cap // 2
        marker = f"\n[... {len(data) - cap} bytes dropped ...]\n".encode()
        assert kept == data[: cap - tail] + marker + data[len(data) - tail :]


def test_twenty_megabytes_without_a_newline_are_no_error(tmp_path: Path) -> None:
    work = RolloutFolder(tmp_path / "r", max_bytes=3 << 20)
    kept = fill(work, "out", [bytes([65 + n % 26]) * 65536 for n in range(320)])
    assert b"[... 17825792 bytes dropped ...]" in kept
    assert len(kept) < (3 << 20) + 100
    assert kept.startswith(b"A" * 65536)
    assert kept.endswith(bytes([65 + 319 % 26]) * 65536)


def test_what_was_written_is_on_file_before_the_sink_is_closed(work: RolloutFolder) -> None:
    async def main() -> None:
        async with work.sink("out") as sink:
            sink(b"x" * 900)
            sink(b"the last words")
            seen = (work.folder / "out").read_bytes()
            assert seen == b"x" * 900 + b"the last words"

    anyio.run(main)


def test_an_error_in_the_block_keeps_the_output(work: RolloutFolder) -> None:
    async def main() -> None:
        async with work.sink("out") as sink:
            sink(b"partial")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        anyio.run(main)
    assert (work.folder / "out").read_bytes() == b"partial"


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        work = RolloutFolder(tmp_path / "w")
        work.write("a/b/c.txt", b"x")
        fill(work, "agent/stdout.txt", [b"y"])
    finally:
        os.umask(before)
    for path in (work.work, *work.work.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "name", ["", ".", "/etc/x", "../x", "a/../../x", "a/", "rollout.json", "a\0b", "./rollout.json"]
)
def test_names_that_lead_elsewhere_are_refused(work: RolloutFolder, name: str) -> None:
    with pytest.raises(DayflyError) as caught:
        work.write(name, b"x")
    assert caught.value.cause == "bad_name"
    assert not any(work.folder.iterdir())


def test_no_link_of_the_agent_is_followed(work: RolloutFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("mine")
    (work.folder / "artifacts").symlink_to(outside)
    with pytest.raises(HostError):
        work.write("artifacts/f", b"x")
    (work.folder / "l").symlink_to(outside / "f")
    work.write("l", b"x")
    assert (outside / "f").read_text() == "mine"
    assert (work.folder / "l").read_bytes() == b"x"
    assert not (work.folder / "l").is_symlink()


def test_write_replaces_and_a_sink_does_not(work: RolloutFolder) -> None:
    work.write("f", b"one")
    work.write("f", b"two")
    assert (work.folder / "f").read_bytes() == b"two"
    with pytest.raises(HostError):
        fill(work, "f", [b"x"])
    assert (work.folder / "f").read_bytes() == b"two"


def test_the_disk_is_kept_when_there_is_one(work: RolloutFolder) -> None:
    work.keep_disk()
    (work.scratch / "disk.img").write_bytes(b"disk")
    work.keep_disk()
    assert (work.folder / "disk.img").read_bytes() == b"disk"
    assert not (work.scratch / "disk.img").exists()
