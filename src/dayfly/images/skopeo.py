"""skopeo as the client of registries: manifests as they are, blobs by digest.

skopeo brings what a person has set up for registries: `registries.conf` (mirrors, remaps, insecure, blocked),
the auth file and credential programs, certificates, signature policy, and the answer to 429. Manifests come
from `skopeo inspect --raw`; blobs from `skopeo experimental-image-proxy`, which hands each one out through a
pipe, so that only the layers that are missing here are downloaded, and are hashed on their way to the disk.
"""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen  # noqa: TID251 - the type only
from typing import Any

from dayfly import process
from dayfly.errors import DayflyError

HINT = "install it: `apt-get install skopeo`"
_TICK_S = 0.2
_MAX_MESSAGE = 32 << 10


class SkopeoFailed(Exception):
    """skopeo's own words; `dayfly.images.faults` says what they mean."""


class TooSlow(SkopeoFailed):
    """No answer, or too few bytes, within the bound."""


class Stopped(DayflyError):
    """Whoever wanted the image does not want it any more."""

    cause = "cancelled"


@dataclass(frozen=True)
class PullLimits:
    """Bounds of a pull, in seconds and bytes."""

    answer_s: float = 180.0
    """For one answer; skopeo waits out a 429 in it: five times, each for `Retry-After` or up to a minute."""
    window_s: float = 60.0
    window_bytes: int = 64 << 10
    """A blob of which fewer bytes than this come in one window is too slow."""
    total_s: float = 1800.0
    attempts: int = 3
    pause_s: float = 1.0
    """Before the second attempt; four times as long before each further one."""
    breaker_failures: int = 4
    """So many failed attempts in a row, and a registry is not asked for a while."""
    breaker_pause_s: float = 60.0


@dataclass
class Watch:
    """What goes on in a pull, for somebody who looks on from another thread."""

    note: Callable[[str], None] = lambda text: None
    """Called with a line for a person: a retry, a wait."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set it to end the pull soon; it raises `Stopped` then."""
    resolved: str = ""
    """Digest of the manifest, as soon as it is known."""
    fetched_bytes: int = 0

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped("the pull was stopped")

    def pause(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check()


def skopeo() -> list[str]:
    """The beginning of each command. Raises `HostError` when skopeo is not installed.

    Debian 12's skopeo does not read CONTAINERS_REGISTRIES_CONF, which podman and buildah do.
    """
    found = [str(process.which("skopeo", HINT))]
    if conf := os.environ.get("CONTAINERS_REGISTRIES_CONF"):
        found += ["--registries-conf", conf]
    return found


def read_manifest(reference: str, staging: Path, limits: PullLimits, watch: Watch) -> bytes:
    """The bytes of a manifest or index, as the registry has them. Raises `SkopeoFailed`, `Stopped`."""
    with tempfile.TemporaryFile(dir=staging) as out, tempfile.TemporaryFile(dir=staging) as err:
        command = [
            *skopeo(),
            "--command-timeout",
            f"{limits.answer_s + 10:.0f}s",
            "inspect",
            "--raw",
            f"docker://{reference}",
        ]
        popen = process.spawn(command, stdout=out, stderr=err)
        with _ended(popen):
            _until(lambda: popen.poll() is not None, limits.answer_s, watch)
        err.seek(0)
        if popen.returncode != 0:
            raise SkopeoFailed(_last_words(err.read(64 << 10)))
        out.seek(0)
        return out.read()


class ImageProxy:
    """One running `experimental-image-proxy` for one image."""

    def __init__(self, control: socket.socket, limits: PullLimits, watch: Watch) -> None:
        self._control = control
        self._limits = limits
        self._watch = watch
        self._image = 0

    @classmethod
    @contextmanager
    def opened(cls, reference: str, limits: PullLimits, watch: Watch) -> Iterator[ImageProxy]:
        """Raises `SkopeoFailed`, `Stopped`; so does everything else here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                command = [*skopeo(), "experimental-image-proxy", "--sockfd", str(theirs.fileno())]
                popen = process.spawn(command, pass_fds=[theirs.fileno()])
            with _ended(popen):
                proxy = cls(ours, limits, watch)
                proxy.call("Initialize")
                proxy._image = proxy.call("OpenImage", f"docker://{reference}")[0]["value"]
                yield proxy

    def blob(self, digest: str, size: int) -> BlobStream:
        """`size` is what the manifest says; skopeo compares it, and the digest."""
        reply, fds = self.call("GetBlob", self._image, digest, size)
        if len(fds) != 1:
            raise SkopeoFailed("skopeo handed out no pipe for a blob")
        # skopeo closes the pipe only once this is asked for, also when the blob ends early.
        self.send("FinishPipe", int(reply["pipeid"]))
        return BlobStream(self, fds[0], digest, size, self._limits, self._watch)

    def call(self, method: str, *args: Any) -> tuple[dict[str, Any], list[int]]:
        """One request; the descriptors of the reply belong to the caller."""
        self.send(method, *args)
        return self.receive()

    def send(self, method: str, *args: Any) -> None:
        try:
            self._control.send(json.dumps({"method": method, "args": args}).encode())
        except OSError as e:
            raise SkopeoFailed(f"skopeo ended before {method}: {e}") from e

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            _until(lambda: _readable(self._control.fileno()), self._limits.answer_s, self._watch)
            data, fds, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 4)
            reply = dict(json.loads(data))
        except (OSError, ValueError) as e:
            raise SkopeoFailed(f"skopeo ended without an answer: {e}") from e
        if not reply.get("success"):
            for fd in fds:
                os.close(fd)
            raise SkopeoFailed(str(reply.get("error")))
        return reply, fds


class BlobStream:
    """A blob on its way. At its end it has been compared with its size and digest by skopeo."""

    def __init__(
        self, proxy: ImageProxy, fd: int, digest: str, size: int, limits: PullLimits, watch: Watch
    ) -> None:
        self._proxy, self._fd, self._digest = proxy, fd, digest
        self._left = size
        self._limits, self._watch = limits, watch
        self._window_ends = time.monotonic() + limits.window_s
        self._in_window = 0

    def read(self, size: int = -1) -> bytes:
        """What is there, at most `size` bytes; empty at the end. Raises `SkopeoFailed`, `Stopped`."""
        while not _readable(self._fd):
            self._watch.check()
            self._check_speed()
        data = os.read(self._fd, size if size > 0 else 1 << 20)
        self._watch.check()
        self._left -= len(data)
        self._in_window += len(data)
        self._watch.fetched_bytes += len(data)
        if self._left < 0:
            raise SkopeoFailed(f"corrupted blob: {self._digest} is longer than its manifest says")
        if not data:
            self._proxy.receive()  # the answer to FinishPipe: size and digest were right
        else:
            self._check_speed()
        return data

    def _check_speed(self) -> None:
        now = time.monotonic()
        if now < self._window_ends:
            return
        if self._in_window < self._limits.window_bytes:
            raise TooSlow(
                f"of {self._digest} came {self._in_window} bytes in {self._limits.window_s:g} s, "
                f"{self._left} are missing"
            )
        self._window_ends, self._in_window = now + self._limits.window_s, 0

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> BlobStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _readable(fd: int) -> bool:
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_TICK_S * 1000))


def _until(done: Callable[[], bool], bound_s: float, watch: Watch) -> None:
    deadline = time.monotonic() + bound_s
    while not done():
        watch.check()
        if time.monotonic() >= deadline:
            raise TooSlow(f"no answer within {bound_s:g} s")
        time.sleep(0.005)


@contextmanager
def _ended(popen: Popen[bytes]) -> Iterator[None]:
    """See a skopeo gone that may be in the middle of something."""
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while popen.poll() is None and time.monotonic() < deadline:
            process.kill_group(popen)
            time.sleep(0.002)


def _last_words(stderr: bytes) -> str:
    """The message of skopeo's last log line: `time="…" level=fatal msg="…"`."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines() or ["skopeo said nothing"]
    _, found, message = lines[-1].partition(" msg=")
    with suppress(ValueError):
        return str(json.loads(message)) if found else lines[-1]
    return lines[-1]


def version() -> str:
    """The version line of skopeo. Raises `HostError`."""
    found = process.run([process.which("skopeo", HINT), "--version"], timeout_s=20)
    return found.stdout.decode().strip()
