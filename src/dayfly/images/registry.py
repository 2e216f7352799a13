"""Images from OCI registries, shown to `sources.py` as if each were an OCI layout.

A tag is resolved to the digest of one manifest first; everything after that goes by digest. Faults that may
pass are tried again; a registry that keeps failing is not asked any more for a while.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from dayfly.errors import DayflyError, ImageError, InfraError
from dayfly.images.faults import Fault, as_error, understand
from dayfly.images.layout import INDEX_TYPE, MANIFEST_TYPE, digest_of, encode
from dayfly.images.names import Reference
from dayfly.images.skopeo import ImageProxy, PullLimits, SkopeoFailed, TooSlow, Watch, read_manifest
from dayfly.images.sources import INDEX_TYPES, MAX_IMAGE, Draft, TakeLayer, parse_document, read_layout

Read = Callable[[], Draft]


@dataclass
class Registries:
    """All registries that one job, or one command, asks. Safe to use from several threads."""

    limits: PullLimits = field(default_factory=PullLimits)
    _breakers: dict[str, Breaker] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetch(self, reference: Reference, staging: Path, architecture: str, take: TakeLayer, watch: Watch) -> Draft:
        """The image for `architecture`, in `staging`. A tag is resolved anew, but only once.

        Raises `ImageError` (see `faults.py` for the causes), `HostError`, `Stopped`.
        """
        breaker = self._breaker(reference.host)
        ends = time.monotonic() + self.limits.total_s
        top: list[bytes] = []
        attempt = 1
        while True:
            breaker.check(reference)
            try:
                draft = self._read(reference, staging, architecture, take, watch, top, ends)
            except SkopeoFailed as failure:
                fault = understand(failure)
                error = as_error(failure, fault, reference)
                breaker.failed(fault, error)
                pause = self.limits.pause_s * 4 ** (attempt - 1)
                if not fault.passes or attempt >= self.limits.attempts or time.monotonic() + pause > ends:
                    raise error from failure
                watch.note(f"{error.message}; attempt {attempt + 1} in {pause:g} s")
                watch.pause(pause)
                attempt += 1
            else:
                breaker.succeeded()
                return draft

    def _read(
        self,
        reference: Reference,
        staging: Path,
        architecture: str,
        take: TakeLayer,
        watch: Watch,
        top: list[bytes],
        ends: float,
    ) -> Draft:
        """One attempt. `top` keeps what the tag was resolved to: a later attempt goes on with that."""
        if not top:
            data = read_manifest(reference.pinned, staging, self.limits, watch)
            if reference.digest and digest_of(data) != reference.digest:
                raise SkopeoFailed(f"the manifest does not match {reference.digest}")
            top.append(data)
        with ExitStack() as stack:
            blobs = RegistryBlobs(reference, top[0], staging, self.limits, watch, stack, ends)
            try:
                return read_layout(blobs, staging, architecture, take)
            except ImageError as e:
                raise _named(e, reference) from e

    def _breaker(self, host: str) -> Breaker:
        with self._lock:
            return self._breakers.setdefault(host, Breaker(host, self.limits))


class RegistryBlobs:
    """An image of a registry, read as a layout (`sources.Blobs`): an index of one, and blobs by digest."""

    def __init__(
        self,
        reference: Reference,
        top: bytes,
        staging: Path,
        limits: PullLimits,
        watch: Watch,
        stack: ExitStack,
        ends: float,
    ) -> None:
        self._reference, self._staging = reference, staging
        self._limits, self._watch, self._stack, self._ends = limits, watch, stack, ends
        document = parse_document(top, "manifest")
        listed = document.get("mediaType") in INDEX_TYPES or ("manifests" in document and "config" not in document)
        digest, kind = digest_of(top), INDEX_TYPE if listed else MANIFEST_TYPE
        descriptor = {"mediaType": kind, "digest": digest, "size": len(top)}
        self._here = {
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
            "index.json": encode({"manifests": [descriptor]}),
            _blob_name(digest): top,
        }
        self._sizes: dict[str, int] = {}
        self._proxy: ImageProxy | None = None
        self._note_blobs(digest, document)

    def open(self, name: str) -> IO[bytes] | None:
        if name not in self._here and name not in self._sizes:
            self._fetch_manifest(name)
        if name in self._here:
            return io.BytesIO(self._here[name])
        if time.monotonic() > self._ends:
            raise TooSlow(f"the pull took longer than {self._limits.total_s:g} s")
        if self._proxy is None:
            manifest = f"{self._reference.repository}@{self._watch.resolved}"
            self._proxy = self._stack.enter_context(ImageProxy.opened(manifest, self._limits, self._watch))
        return cast(IO[bytes], self._proxy.blob(_digest_of_name(name), self._sizes[name]))

    def size(self, name: str) -> int:
        return len(self._here[name]) if name in self._here else self._sizes[name]

    def _fetch_manifest(self, name: str) -> None:
        """A manifest that an index names. Its digest is compared by who reads it."""
        reference = f"{self._reference.repository}@{_digest_of_name(name)}"
        data = read_manifest(reference, self._staging, self._limits, self._watch)
        self._here[name] = data
        self._note_blobs(digest_of(data), parse_document(data, "manifest"))

    def _note_blobs(self, digest: str, document: dict[str, Any]) -> None:
        """Sizes of what a manifest names: an index names no blobs."""
        layers = document.get("layers")
        found = [document.get("config"), *(layers if isinstance(layers, list) else [])]
        blobs = [d for d in found if isinstance(d, dict) and isinstance(d.get("size"), int)]
        if sum(d["size"] for d in blobs) > MAX_IMAGE or any(d["size"] < 0 for d in blobs):
            raise ImageError(f"the image has more than {MAX_IMAGE >> 30} GiB of layers, which no disk holds")
        self._sizes |= {_blob_name(str(d.get("digest"))): d["size"] for d in blobs}
        if blobs:
            self._watch.resolved = digest


class Breaker:
    """Keeps a registry that fails from being asked again and again. Only faults of the registry count."""

    def __init__(self, host: str, limits: PullLimits) -> None:
        self._host, self._limits = host, limits
        self._failures = 0
        self._first: InfraError | None = None
        self._asked = 0.0
        self._lock = threading.Lock()

    def check(self, reference: Reference) -> None:
        """Raise the first failure's cause while the registry is left alone; now and then one may try."""
        with self._lock:
            if self._first is None or self._failures < self._limits.breaker_failures:
                return
            now = time.monotonic()
            if now - self._asked >= self._limits.breaker_pause_s:
                self._asked = now
                return
            raise ImageError(
                f"{reference.pinned} was not asked for: {self._failures} attempts in a row failed at {self._host}, "
                f"the first so: {self._first.message}",
                hint=self._first.hint,
                cause=self._first.cause,
            )

    def failed(self, fault: Fault, error: InfraError) -> None:
        if fault.of_registry:
            with self._lock:
                self._failures += 1
                self._first = self._first or error
                self._asked = time.monotonic()

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._first = 0, None


def _named(error: ImageError, reference: Reference) -> DayflyError:
    return type(error)(f"{reference.pinned}: {error.message}", hint=error.hint, cause=error.cause)


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _digest_of_name(name: str) -> str:
    return f"sha256:{name.rpartition('/')[2]}"
