"""A file tree to a read-only squashfs disk, through `tar2sqfs` of squashfs-tools-ng.

Nothing is unpacked or mounted, no privilege is needed, and the same tree gives the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from dayfly import process
from dayfly.errors import HostError
from dayfly.images.inflate import CHUNK
from dayfly.images.tar import BLOCK, END, Entry, write_header
from dayfly.images.tree import Tree

DISK_VIRTUAL_BYTES = 64 * 2**30
"""Every disk file has this length (sparse), so that one VM template serves every image."""

COMPRESSION = ("lz4", "")
"""Compressor and its options. In a guest under emulation inflating is what costs, not the disk's size.

Measured under TCG (kernel 6.1, Debian base of 224 MB; mount, read python and all libraries, start python
and git; three runs each): lz4 2.2-2.7 s at 106 MB, zstd level 3 2.7-3.2 s at 77 MB, gzip level 1 3.8-4.3 s at
82 MB; smaller blocks were no faster. The host needs 0.5, 0.7 and 1.4 s to make them.
"""

FORMAT_VERSION = 1
"""Counted up when the same image would give other bytes for a reason that is ours."""

INSTALL_HINT = "apt-get install squashfs-tools-ng"


@functools.cache
def tool_version() -> str:
    """What the bytes of a disk depend on besides the image. Raises `HostError` without tar2sqfs."""
    tool = process.which("tar2sqfs", INSTALL_HINT)
    line = process.run([tool, "--version"], timeout_s=30).stdout.split(b"\n", 1)[0].decode()
    return f"{line} {':'.join(COMPRESSION)} format {FORMAT_VERSION}"


def build_disk(tree: Tree, layers: Sequence[int], dest: Path, *, timeout_s: float) -> tuple[str, int]:
    """Write `tree` to the new file `dest`; `layers` are descriptors of the inflated layers.

    Returns the sha256:… and the length of the squashfs data; after it the file is sparse up to
    `DISK_VIRTUAL_BYTES`. Raises `HostError`.
    """
    compressor, options = COMPRESSION
    argv: list[str | Path] = [process.which("tar2sqfs", INSTALL_HINT), "--quiet", "--no-skip", "--force"]
    argv += ["--compressor", compressor, "--num-jobs", str(min(os.cpu_count() or 1, 8))]
    argv += ["--comp-extra", options] if options else []
    env = {**os.environ, "LC_ALL": "C"}  # its messages are looked at
    # In memory, for the disk may be full when there is something to say.
    with os.fdopen(os.memfd_create("messages"), "w+b") as messages:
        tool = process.spawn([*argv, dest], stdin=process.PIPE, stdout=messages, stderr=messages, env=env)
        # Ends a tool that hangs, and with it the write to its pipe.
        watchdog = threading.Timer(timeout_s, process.kill_group, [tool])
        watchdog.start()
        assert tool.stdin is not None
        try:
            sent, complete = _write_tar(tree, layers, tool.stdin)
            status = tool.wait()
        except BaseException:
            process.kill_group(tool)
            raise
        finally:
            watchdog.cancel()
            tool.wait()
            with suppress(BrokenPipeError):
                tool.stdin.close()
        if status != 0 or not complete:
            messages.seek(0)
            said = messages.read(65536).decode("utf-8", "replace").strip()
            raise _tool_error(status, said, full=shutil.disk_usage(dest.parent).free <= sent)
    return _finish(dest)


def _write_tar(tree: Tree, layers: Sequence[int], out: IO[bytes]) -> tuple[int, bool]:
    """Send the tree as one tar; returns how many bytes were sent, and False when the reader went away."""
    sent = 0
    try:
        for entry, layer in tree.walk():
            header = write_header(_named(entry))
            out.write(header)
            _copy(layers[layer] if entry.size else -1, entry, out)
            sent += len(header) + entry.size
        out.write(END)
        out.close()
    except BrokenPipeError:
        return sent + entry.size, False
    return sent, True


def _named(entry: Entry) -> Entry:
    return entry if entry.name else replace(entry, name=b".")


def _copy(fd: int, entry: Entry, out: IO[bytes]) -> None:
    at, written = entry.offset, 0
    for start, length in ((0, entry.size),) if entry.pieces is None else entry.pieces:
        _write_zeros(start - written, out)
        end = at + length
        while at < end:
            data = os.pread(fd, min(CHUNK, end - at), at)
            if not data:
                raise HostError("an inflated layer was cut off while it was read")
            out.write(data)
            at += len(data)
        written = start + length
    _write_zeros(entry.size - written + -entry.size % BLOCK, out)


def _write_zeros(count: int, out: IO[bytes]) -> None:
    while count > 0:
        out.write(bytes(min(CHUNK, count)))
        count -= CHUNK


def _tool_error(status: int, said: str, *, full: bool) -> HostError:
    """`full`: the tool has deleted its output, and there is less room than it was sent."""
    # It says only "I/O error" when the disk is full.
    if (full and "I/O error" in said) or status == -signal.SIGXFSZ:
        return HostError(
            "there is no room for the image's disk",
            hint="free some space: `dayfly image prune`, `df -h`, `ulimit -f`",
            cause="host_disk_full",
        )
    return HostError(f"tar2sqfs ended with status {status}", hint=said or None, cause="host_program")


def _finish(path: Path) -> tuple[str, int]:
    """Digest and length of the data; the file is padded and safe on disk after this."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        length = os.fstat(file.fileno()).st_size
        file.truncate(DISK_VIRTUAL_BYTES)
        os.fsync(file.fileno())
    return f"sha256:{digest}", length
