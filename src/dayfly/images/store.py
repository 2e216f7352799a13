"""The images on this machine, and the disks made from them.

    blobs/sha256/<hex>        manifests, configurations and layers, by digest
    images/<hex>.json         one per image: when it was imported, when it was last used
    names/<quoted name>       one per name (`repository:tag`, or `repository@digest` of a pull by digest): the
                              digest of its manifest
    disks/<key>.squashfs      made disks; locked (shared) while a VM uses one
    disks/<key>.json          what the disk is; written last, so a disk without it does not exist
    locks/, staging/          for work in progress

Everything is made in `staging/` and moved into place. Several processes may use one store at once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote, unquote

from dayfly.errors import ConfigError, HostError, ImageError, NotFoundError
from dayfly.images.inflate import HashingReader, inflate, is_compressed
from dayfly.images.layout import digest_of
from dayfly.images.locks import lock_shared, locked, try_locked
from dayfly.images.names import Reference, parse_reference
from dayfly.images.registry import Registries
from dayfly.images.skopeo import Watch
from dayfly.images.sources import (
    MAX_IMAGE,
    Draft,
    declared_healthcheck,
    declared_volumes,
    host_architecture,
    image_config,
    read_source,
    walk_layers,
)
from dayfly.images.squashfs import DISK_VIRTUAL_BYTES, build_disk, tool_version
from dayfly.images.tar import read_entries
from dayfly.images.tree import Tree
from dayfly.model import Disk, ImageConfig

BUILD_TIMEOUT_S = 1800.0
STORE_TIMEOUT_S = 300.0

PullPolicy = Literal["missing", "always", "never"]
Stage = Callable[[], Path]
Digests = list[str]  # `list` is a method below
Metas = dict[str, list[tuple[Path, dict[str, Any]]]]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Image:
    """An image in the store."""

    name: str
    """As stored (`repository:tag`, or `repository@digest`); empty when it was asked for by digest."""
    digest: str
    """sha256:… of the manifest."""
    config: ImageConfig
    layers: tuple[str, ...]
    """Digests, lowest first."""
    created: str = ""
    """As the image says; may be empty."""
    volumes: tuple[str, ...] = ()
    """Paths declared as volumes. Their content is part of the disk; nothing else is done for them."""
    healthcheck: tuple[str, ...] = ()
    """Noted, not acted upon: a task has its own."""


@dataclass(frozen=True)
class ImageInfo:
    """One line of `image list`: one name of one image. Sizes in bytes, times in seconds since 1970."""

    name: str
    """Empty for an image whose name has moved to another."""
    digest: str
    created: str
    imported: float
    last_used: float
    layers: int
    blob_bytes: int
    """Of the layers, as they were imported."""
    shared_bytes: int
    """Of `blob_bytes`, what other images use too."""
    disk_bytes: int
    """Of the made disk; 0 when there is none yet."""
    in_use: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Layer:
    digest: str
    bytes: int
    shared_with: tuple[str, ...]
    """Names (or digests) of other images that have it."""


@dataclass(frozen=True)
class ImageDetail:
    """What `image inspect` says. Sizes in bytes, times in seconds since 1970."""

    digest: str
    names: tuple[str, ...]
    config: ImageConfig
    created: str
    imported: float
    last_used: float
    layers: tuple[Layer, ...]
    """Lowest first."""
    disk_bytes: int
    disk_digest: str
    """Empty when there is no disk yet."""
    in_use: bool
    volumes: tuple[str, ...]
    healthcheck: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.model_dump(mode="json")}


class ImageStore:
    """Imports and pulls images and makes disks of them. Blocking: call it from a thread in async code."""

    def __init__(self, cache_dir: Path | None = None, *, architecture: str | None = None) -> None:
        """`cache_dir`: default `<XDG cache>/dayfly/images`, made when first written to."""
        self._root = cache_dir or default_folder()
        self._architecture = architecture or host_architecture()

    def import_image(
        self,
        source: Path | IO[bytes],
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
    ) -> Image:
        """Take an OCI layout folder, an OCI or docker archive, or a root filesystem tar in as `name`.

        `env`, `workdir` and `user` are for a plain root filesystem tar, which says nothing of them.
        A name that is taken moves to the new image. Raises `ImageError` (damaged, wrong architecture,
        several images), `NotFoundError`, `ConfigError` (bad name, or env and the like for an image that
        has its own), `HostError`.
        """
        kept, config = _name_to_keep(name), None
        if env or workdir or user:
            config = ImageConfig(
                env=dict(env or {}), workdir=workdir or "/", user=user or "", architecture=self._architecture
            )
        with self._staging() as staging, _full_disk_said():
            draft = read_source(source, staging, config, self._architecture)
            image_config(draft.config)
            list(walk_layers(draft.manifest))
            with self._changing():
                self._publish(draft, kept)
        return self.resolve(kept)

    def resolve(self, ref: str) -> Image:
        """The image `name[:tag]`, `name[:tag]@digest` or `sha256:…` (at least 12 digits).

        Raises `NotFoundError` with near names in the hint.
        """
        reference = parse_reference(ref)
        digest = self._find(reference)
        if digest is None:
            raise self._not_found(ref, reference)
        manifest = self._document(digest)
        document = self._document(str(manifest["config"]["digest"]))
        return Image(
            name=reference.pinned,
            digest=digest,
            config=image_config(document),
            layers=tuple(walk_layers(self._blob(digest).read_bytes())),
            created=str(document.get("created") or ""),
            volumes=declared_volumes(document),
            healthcheck=declared_healthcheck(document),
        )

    def find(self, ref: str) -> Image | None:
        """As `resolve`, and None when it is not there."""
        try:
            return self.resolve(ref)
        except NotFoundError:  # also when it is pruned at this moment
            return None

    def add_name(self, image: Image, name: str) -> None:
        """Give an image a further name; one that is taken moves. Raises `ConfigError` for a bad name."""
        kept = _name_to_keep(name)
        with self._changing():
            _write(self._name_file(kept), {"digest": image.digest})

    def pull(
        self,
        ref: str,
        registries: Registries | None = None,
        *,
        policy: PullPolicy = "missing",
        watch: Watch | None = None,
    ) -> Image:
        """The image `name[:tag]` or `name[:tag]@digest`, from its registry when it is not here.

        `policy`: `missing` asks the registry only then, `always` also when a tag is here already, `never` not
        at all. What is pulled goes by its manifest's digest, each layer is downloaded once however many want
        it, and a pull that fails leaves no image and no part of a file. Raises `NotFoundError` (with `never`),
        `ImageError`, `HostError`, `Stopped`.
        """
        registries, watch = registries or Registries(), watch or Watch()
        reference = parse_reference(ref)
        fixed = bool(reference.digest)
        with self._once(f"pull-{reference.pinned}", registries.limits.total_s, watch, what=ref):
            found = self.find(ref)
            if policy == "never" or not reference.name:
                return found or self.resolve(ref)
            if found is not None and (fixed or policy == "missing"):
                watch.resolved = found.digest
                return found
            with _full_disk_said():
                self._fetch(reference, registries, watch)
        return self.resolve(ref)

    def disk(self, image: Image, *, timeout_s: float = BUILD_TIMEOUT_S) -> Disk:
        """The image's disk, made now if it was not yet; two processes at once make it once.

        Raises `ImageError` for an image that cannot be one file tree, `HostError` for a full disk.
        """
        key = self._disk_key(image.digest)
        if (disk := self._read_disk(key, image)) is not None:
            return disk
        with locked(self._root / "locks" / key, timeout_s, what=f"the disk of {image.name or image.digest}"):
            if (disk := self._read_disk(key, image)) is not None:
                return disk
            with self._staging() as staging, _full_disk_said():
                self._make_disk(image, key, staging, timeout_s)
        disk = self._read_disk(key, image)
        if disk is None:
            raise HostError(f"the disk of {image.name} was deleted while it was made", hint="run it again")
        return disk

    @contextmanager
    def using(self, disk: Disk) -> Iterator[Disk]:
        """Keep `disk` from being pruned or removed, by any process, until the end of the block.

        Raises `NotFoundError` when that has happened already.
        """
        fd = None
        deadline = time.monotonic() + 10
        try:
            while fd is None and time.monotonic() < deadline:
                fd = lock_shared(disk.path)
                if fd is None:
                    time.sleep(0.02)
        except FileNotFoundError:
            pass
        if fd is None:
            raise NotFoundError(f"the disk of {disk.image or disk.image_digest} is gone", hint="make it again")
        try:
            os.utime(disk.path.with_suffix(".json"))  # the time of the last use
            yield disk
        finally:
            os.close(fd)

    def list(self) -> tuple[ImageInfo, ...]:
        """What is in the store, sorted by name; nameless images last."""
        layers = {digest: self._layer_sizes(digest) for digest in self._digests()}
        disks = self._disk_metas()
        names = self._names()
        infos = []
        for digest, own in layers.items():
            others = {layer for other, theirs in layers.items() if other != digest for layer in theirs}
            record = self._record(digest)
            made = disks.get(digest, [])
            info = ImageInfo(
                name="",
                digest=digest,
                created=str(self._config_document(digest).get("created") or ""),
                imported=float(_read_json(record).get("imported", 0)),
                last_used=max(path.stat().st_mtime for path in [record, *(path for path, _ in made)]),
                layers=len(own),
                blob_bytes=sum(own.values()),
                shared_bytes=sum(size for layer, size in own.items() if layer in others),
                disk_bytes=sum(int(found["bytes"]) for _, found in made),
                in_use=any(_is_locked(path.with_suffix(".squashfs")) for path, _ in made),
            )
            own_names = [name for name, named in names.items() if named == digest]
            infos += [replace(info, name=name) for name in own_names or [""]]
        return tuple(sorted(infos, key=lambda info: (not info.name, info.name, info.digest)))

    def describe(self, ref: str) -> ImageDetail:
        """Everything about one image. Raises `NotFoundError`."""
        image = self.resolve(ref)
        infos = [info for info in self.list() if info.digest == image.digest]
        names: dict[str, Digests] = {}
        for name, digest in self._names().items():
            names.setdefault(digest, []).append(name)
        owners: dict[str, Digests] = {}
        for digest in self._digests():
            for layer in self._layer_sizes(digest) if digest != image.digest else ():
                owners.setdefault(layer, []).extend(names.get(digest, [digest]))
        sizes = self._layer_sizes(image.digest)
        disk = self._read_disk(self._disk_key(image.digest), image)
        return ImageDetail(
            digest=image.digest,
            names=tuple(sorted(names.get(image.digest, []))),
            config=image.config,
            created=image.created,
            imported=infos[0].imported,
            last_used=infos[0].last_used,
            layers=tuple(Layer(d, sizes[d], tuple(sorted(owners.get(d, [])))) for d in image.layers),
            disk_bytes=infos[0].disk_bytes,
            disk_digest=disk.digest if disk else "",
            in_use=infos[0].in_use,
            volumes=image.volumes,
            healthcheck=image.healthcheck,
        )

    def remove(self, ref: str) -> None:
        """Take a name away, and with its last name the image. Raises `ImageError` when its disk is in use."""
        reference = parse_reference(ref)
        with self._changing():
            digest = self._find(reference)
            if digest is None:
                raise self._not_found(ref, reference)
            file = self._name_file(reference.pinned)
            if reference.name and file.exists() and list(self._names().values()).count(digest) > 1:
                file.unlink()
            elif not self._drop([digest]):
                raise ImageError(f"{ref} is in use by a running VM", hint="wait for its job, or stop it")

    def prune(self, names: Sequence[str] | None = None, *, unused_s: float | None = None) -> tuple[str, ...]:
        """Delete images, and whatever nothing refers to: outdated disks, blobs, left-over pieces.

        `names`: only these images. Else nameless images and, with `unused_s`, those not used for so many
        seconds. What a VM uses always stays. Returns the names (or digests) of what is gone.
        """
        with self._changing():
            infos = self.list()
            if names:
                wanted = {self.resolve(name).digest for name in names}
            else:
                limit = time.time() - unused_s if unused_s is not None else 0.0
                wanted = {info.digest for info in infos if not info.name or info.last_used <= limit}
            gone = self._drop(sorted(wanted))
            return tuple(info.name or info.digest for info in infos if info.digest in gone)

    # --- writing -----------------------------------------------------------------------------

    def _fetch(self, reference: Reference, registries: Registries, watch: Watch) -> None:
        kept: Digests = []
        with self._staging() as staging:
            take = partial(self._take_layer, staging, kept, registries.limits.total_s, watch)
            try:
                draft = registries.fetch(reference, staging, self._architecture, take, watch)
                image_config(draft.config)
                with self._changing():
                    self._publish(draft, reference.pinned)
            except (OSError, HostError):  # a full disk must not be kept full by layers of no image
                self._forget(kept)
                raise

    def _take_layer(
        self,
        staging: Path,
        kept: Digests,
        timeout_s: float,
        watch: Watch,
        digest: str,
        size: int | None,
        stage: Stage,
    ) -> Path:
        """A layer that another image has, or has got meanwhile, is linked; else it is staged and kept at once."""
        place, blob = staging / _hex(digest), self._blob(digest)
        with self._once(f"blob-{digest}", timeout_s, watch, what=f"the layer {digest}"):
            if place.exists():  # from an attempt before
                return place
            with suppress(FileNotFoundError):  # also when it is swept between the two
                if blob.stat().st_size == size:
                    os.link(blob, place)
                    return place
            stage()
            _folder(blob.parent)
            os.link(place, staging / "link")
            (staging / "link").rename(blob)
            kept.append(digest)
        return place

    @contextmanager
    def _once(self, key: str, timeout_s: float, watch: Watch, *, what: str) -> Iterator[None]:
        """Only one at a time, of all processes, does what `key` says; the others wait, and then look again."""
        path = self._root / "locks" / hashlib.sha256(key.encode()).hexdigest()[:32]
        with locked(path, timeout_s, what=what, while_waiting=watch.check):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _forget(self, kept: Digests) -> None:
        """Delete layers that no image has."""
        with self._changing():
            wanted = {blob for digest in self._digests() for blob in self._blobs_of(digest)}
            for digest in set(kept) - wanted:
                self._blob(digest).unlink(missing_ok=True)

    def _publish(self, draft: Draft, name: str) -> None:
        blobs = _folder(self._root / "blobs" / "sha256")
        for digest, path in draft.blobs.items():
            path.rename(blobs / _hex(digest))  # also over one that is there: it may be damaged
        _write(self._record(draft.digest), {"digest": draft.digest, "imported": time.time()})
        _write(self._name_file(name), {"digest": draft.digest})

    def _make_disk(self, image: Image, key: str, staging: Path, timeout_s: float) -> None:
        tree = Tree()
        with ExitStack() as stack:
            layers = []
            used = 0
            for digest in image.layers:
                file = stack.enter_context(self._open_layer(digest, staging, MAX_IMAGE - used))
                size = os.fstat(file.fileno()).st_size
                used += size
                tree.apply(read_entries(file.fileno(), size))
                layers.append(file.fileno())
            made = staging / "disk"
            digest, length = build_disk(tree, layers, made, timeout_s=timeout_s)
        made.chmod(0o444)
        disks = _folder(self._root / "disks")
        made.rename(disks / f"{key}.squashfs")
        _write(
            disks / f"{key}.json",
            {"image_digest": image.digest, "digest": digest, "bytes": length, "made_by": tool_version()},
        )

    @contextmanager
    def _open_layer(self, digest: str, staging: Path, most: int) -> Iterator[IO[bytes]]:
        """A layer as an inflated file; its digest is compared while it is read."""
        try:
            blob = self._blob(digest).open("rb")
        except FileNotFoundError:
            raise ImageError(f"the layer {digest} is missing", hint="import the image again") from None
        with blob, tempfile.TemporaryFile(dir=staging) as spool:
            start = blob.read(8)
            blob.seek(0)
            plain = not is_compressed(start)  # then it is read in place
            reader = HashingReader(blob)
            for chunk in inflate(reader, start, most):
                if not plain:
                    spool.write(chunk)
            reader.drain()
            if reader.digest != digest:
                self._blob(digest).unlink(missing_ok=True)  # a pull takes what is here without reading it
                raise ImageError(
                    f"the layer {digest} is damaged: its digest is now {reader.digest}",
                    hint="import the image again, or `dayfly image pull` it",
                    cause="digest_mismatch",
                )
            spool.flush()
            yield blob if plain else spool

    def _drop(self, chosen: Digests) -> Digests:
        """Delete images and their disks unless in use, then what nothing refers to. The store is locked.

        Returns the digests of what is gone.
        """
        gone = [digest for digest in chosen if self._drop_disks(digest)]
        for name, digest in self._names().items():
            if digest in gone:
                self._name_file(name).unlink()
        for digest in gone:
            self._record(digest).unlink(missing_ok=True)
        self._sweep()
        return gone

    def _drop_disks(self, digest: str) -> bool:
        """Delete the disks of an image; False when one is in use or being made."""
        with try_locked(self._root / "locks" / self._disk_key(digest)) as idle:
            if not idle:
                return False
            metas = self._disk_metas().get(digest, [])
            return not [path for path, _ in metas if not _delete_disk(path)]

    def _sweep(self) -> None:
        """Delete disks of other tool versions and of no image, blobs of no image, and dead staging."""
        digests = self._digests()
        current = {self._disk_key(digest) for digest in digests}
        for path in _files(self._root / "disks"):
            if path.stem not in current:
                _delete_disk(path.with_suffix(".json"))
        wanted = {_hex(blob) for digest in digests for blob in self._blobs_of(digest)}
        for path in _files(self._root / "blobs" / "sha256"):
            if path.name not in wanted:
                path.unlink()
        for path in _files(self._root / "locks"):
            if path.name not in current and path.name != "store":
                with try_locked(path) as idle:
                    if idle:
                        path.unlink(missing_ok=True)
        for folder in _files(self._root / "staging"):
            with try_locked(folder) as idle:
                if idle:
                    shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A private folder for work in progress; one whose process has died is swept by `prune`."""
        fd = None
        while fd is None:  # a sweep may come between making and locking
            folder = Path(tempfile.mkdtemp(dir=_folder(self._root / "staging")))
            with suppress(FileNotFoundError):
                fd = lock_shared(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(self._root / "locks" / "store", STORE_TIMEOUT_S, what="the image store"):
            yield

    # --- reading -----------------------------------------------------------------------------

    def _find(self, reference: Reference) -> str | None:
        if not reference.name:
            found = [digest for digest in self._digests() if digest.startswith(reference.digest)]
            return found[0] if len(found) == 1 else None
        try:  # what was asked for by the digest of an index has that of a manifest here
            digest = str(_read_json(self._name_file(reference.pinned))["digest"])
        except FileNotFoundError:
            digest = reference.digest
        return digest if digest and self._record(digest).exists() else None

    def _not_found(self, ref: str, reference: Reference) -> NotFoundError:
        names = sorted(self._names())
        near = get_close_matches(reference.name, names, n=3, cutoff=0.5)
        known = f"near: {', '.join(near)}; " if near else f"there are: {', '.join(names[:5])}; " if names else ""
        return NotFoundError(
            f"there is no image {ref!r} on this machine",
            hint=f"{known}`dayfly image pull` gets it from its registry, or take it in with "
            f"`dayfly image import SOURCE --name {reference.name or 'NAME'}`",
        )

    def _names(self) -> dict[str, str]:
        return {unquote(path.name): _read_json(path)["digest"] for path in _files(self._root / "names")}

    def _digests(self) -> Digests:
        return [f"sha256:{path.stem}" for path in _files(self._root / "images")]

    def _disk_key(self, digest: str) -> str:
        return hashlib.sha256(f"{digest} {tool_version()}".encode()).hexdigest()[:32]

    def _disk_metas(self) -> Metas:
        """Image digest → its made disks (of any tool version)."""
        metas: Metas = {}
        for path in _files(self._root / "disks"):
            if path.suffix == ".json":
                found = _read_json(path)
                metas.setdefault(str(found["image_digest"]), []).append((path, found))
        return metas

    def _read_disk(self, key: str, image: Image) -> Disk | None:
        path = self._root / "disks" / f"{key}.squashfs"
        try:
            meta = _read_json(path.with_suffix(".json"))
            whole = path.stat().st_size == DISK_VIRTUAL_BYTES
        except FileNotFoundError:
            return None
        if not whole or meta.get("image_digest") != image.digest:
            return None
        return Disk(path, str(meta["digest"]), image.config, image.name, image.digest)

    def _blobs_of(self, digest: str) -> Digests:
        manifest = self._document(digest)
        return [digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]

    def _layer_sizes(self, digest: str) -> dict[str, int]:
        layers = walk_layers(self._blob(digest).read_bytes())
        return {layer: self._blob(layer).stat().st_size for layer in layers}

    def _config_document(self, digest: str) -> dict[str, Any]:
        return self._document(str(self._document(digest)["config"]["digest"]))

    def _document(self, digest: str) -> dict[str, Any]:
        """A manifest or configuration, compared with its digest."""
        try:
            data = self._blob(digest).read_bytes()
        except FileNotFoundError:
            data = b""
        if digest_of(data) != digest:
            what = "damaged" if data else "missing"
            raise ImageError(
                f"{digest} is {what} in the store", hint="import the image again", cause="digest_mismatch"
            )
        return dict(json.loads(data))

    def _blob(self, digest: str) -> Path:
        return self._root / "blobs" / "sha256" / _hex(digest)

    def _record(self, digest: str) -> Path:
        return self._root / "images" / f"{_hex(digest)}.json"

    def _name_file(self, name: str) -> Path:
        return self._root / "names" / quote(name, safe="")


def default_folder() -> Path:
    """`<XDG cache>/dayfly/images`."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "dayfly" / "images"


@contextmanager
def _full_disk_said() -> Iterator[None]:
    """Turn the operating system's errors into ours; staging is cleaned up by its owner."""
    try:
        yield
    except OSError as e:
        raise HostError(
            f"the image store could not be written: {e.strerror}",
            hint="free some space: `dayfly image prune`, `df -h`" if e.errno in _FULL else str(e),
            cause="host_disk_full" if e.errno in _FULL else "host_error",
        ) from e


def _delete_disk(meta: Path) -> bool:
    disk = meta.with_suffix(".squashfs")
    with try_locked(disk) as idle:
        if idle:
            meta.unlink(missing_ok=True)
            disk.unlink(missing_ok=True)
        return idle


def _is_locked(path: Path) -> bool:
    with try_locked(path) as idle:
        return not idle


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write a small JSON file so that it is either there as a whole or not."""
    _folder(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)


def _read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ImageError(f"{path} is damaged", hint="`dayfly image prune`, then import the image again")
    return found


def _files(folder: Path) -> list[Path]:
    """What is in `folder`, sorted; half-written files (with a dot) left out."""
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _name_to_keep(name: str) -> str:
    """As the store writes it. Raises `ConfigError` for what cannot name an image here."""
    reference = parse_reference(name)
    if not reference.name or reference.digest:
        raise ConfigError(f"an image is kept under a name, not {name!r}", hint="write name[:tag]")
    return reference.name
