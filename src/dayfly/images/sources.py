"""What `import_image` takes: OCI layout folders, OCI and docker archives, and plain root filesystem tars.

Each is read into a `Draft`: a manifest, a configuration and blobs in a staging folder, every one compared
with its digest. `read_layout` also reads what a registry holds, which `registry.py` shows as a layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from dayfly.errors import ConfigError, ImageError, NotFoundError
from dayfly.images.inflate import CHUNK, inflate, is_compressed
from dayfly.images.layout import CONFIG_TYPE, MANIFEST_TYPE, digest_of, encode, layer_type
from dayfly.images.tar import BLOCK, Entry, Kind, read_entries
from dayfly.model import ImageConfig

MAX_DOCUMENT = 8 << 20
"""Bytes of an index, a manifest or a configuration."""
MAX_LAYERS = 500
MAX_IMAGE = 64 << 30
"""Bytes of all layers, inflated: what fits on a disk."""

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass
class Draft:
    """An image in a staging folder, not yet in the store."""

    manifest: bytes
    config: Mapping[str, Any]
    blobs: dict[str, Path] = field(default_factory=dict)
    """Digest → file in the staging folder; manifest, configuration and layers."""

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


TakeLayer = Callable[[str, int | None, Callable[[], Path]], Path]
"""Digest, size, and a function that stages the layer → its place in the staging folder."""


class Blobs(Protocol):
    """Named pieces of a source: files of a folder, members of an archive, blobs of a registry."""

    def open(self, name: str) -> IO[bytes] | None: ...

    def size(self, name: str) -> int: ...


def host_architecture() -> str:
    """The OCI name of this machine's architecture, which is also the guest's."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


def read_source(source: Path | IO[bytes], staging: Path, config: ImageConfig | None, architecture: str) -> Draft:
    """Read any local source into `staging`. Raises `ImageError`, or `NotFoundError` for a missing path.

    `config` is for a plain root filesystem tar, which has none of its own; `ConfigError` for others.
    """
    if isinstance(source, Path):
        if not source.exists():
            raise NotFoundError(f"{source} does not exist", hint="give an OCI layout folder or a tar file")
        if source.is_dir():
            _refuse(config)
            return read_layout(FolderBlobs(source), staging, architecture)
        with source.open("rb") as file:
            return _from_archive(file, staging, config, architecture)
    spooled = staging / "input"
    with spooled.open("w+b") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
        file.flush()
        file.seek(0)
        return _from_archive(file, staging, config, architecture)


class FolderBlobs:
    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> IO[bytes] | None:
        path = self._root / name
        return path.open("rb") if path.is_file() else None

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size


class ArchiveBlobs:
    """The files of a tar, read in place; links between members (old `docker save`) are followed."""

    def __init__(self, fd: int, entries: Sequence[Entry]) -> None:
        self._fd = fd
        self._entries = {os.fsdecode(entry.name): entry for entry in entries}

    def find(self, name: str) -> Entry | None:
        for _ in range(8):
            entry = self._entries.get(name)
            if entry is None or entry.kind is Kind.FILE:
                return entry
            target = os.fsdecode(entry.target)
            name = target if entry.kind is Kind.HARDLINK else _join(name, target)
        return None

    def open(self, name: str) -> IO[bytes] | None:
        entry = self.find(name)
        return None if entry is None else _Section(self._fd, entry.offset, entry.size)  # type: ignore[return-value]

    def size(self, name: str) -> int:
        entry = self.find(name)
        return 0 if entry is None else entry.size


class _Section:
    """Part of a file as a stream."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset + size

    def read(self, size: int = -1) -> bytes:
        left = self._end - self._at
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        pass

    def __enter__(self) -> _Section:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# --- the kinds of source -------------------------------------------------------------------------


def _from_archive(file: IO[bytes], staging: Path, config: ImageConfig | None, architecture: str) -> Draft:
    start = file.read(BLOCK)
    file.seek(0)
    with ExitStack() as stack:
        plain = file
        if is_compressed(start):
            plain = stack.enter_context(tempfile.TemporaryFile(dir=staging))
            for chunk in inflate(file, start, MAX_IMAGE):
                plain.write(chunk)
            plain.flush()
            file.seek(0)
        return _from_tar(file, plain.fileno(), staging, config, architecture)


def _from_tar(file: IO[bytes], fd: int, staging: Path, config: ImageConfig | None, architecture: str) -> Draft:
    """`fd` is the inflated `file`; which kind of archive it is shows in its members."""
    entries = list(read_entries(fd, os.fstat(fd).st_size, need_end=True))
    if not entries:
        raise ImageError("the tar is empty", hint="it holds no image and no root filesystem")
    members = ArchiveBlobs(fd, entries)
    if members.find("oci-layout") and members.find("index.json"):
        _refuse(config)
        return read_layout(members, staging, architecture)
    if members.find("manifest.json") and not members.find("etc/passwd"):
        _refuse(config)
        return _from_docker(members, staging, architecture)
    return _from_rootfs(file, staging, config or ImageConfig(architecture=architecture), architecture)


def _refuse(config: ImageConfig | None) -> None:
    if config is not None:
        raise ConfigError(
            "this image has a configuration of its own",
            hint="environment, working directory and user can only be given for a plain root filesystem tar",
        )


def read_layout(blobs: Blobs, staging: Path, architecture: str, take: TakeLayer | None = None) -> Draft:
    """An OCI image layout; of several platforms the host's is taken.

    `take` decides where a layer comes from: it may know it already, and then need not have it staged.
    """
    index = _document(blobs, "index.json")
    if _document(blobs, "oci-layout").get("imageLayoutVersion") != "1.0.0":
        raise ImageError("the OCI layout has an unknown version", hint="only version 1.0.0 exists")
    descriptor = _choose(blobs, _list(index, "manifests"), architecture)
    manifest = _stage_document(blobs, descriptor, staging)
    document = parse_document(manifest, "manifest")
    draft = Draft(manifest, {}, {str(descriptor["digest"]): _staged(staging, str(descriptor["digest"]))})
    config = _mapping(document, "config")
    draft.config = parse_document(_stage_document(blobs, config, staging), "configuration")
    draft.blobs[str(config["digest"])] = _staged(staging, str(config["digest"]))
    _check_architecture(draft.config, architecture)
    for layer in _list(document, "layers"):
        digest = _digest(layer)
        if digest not in draft.blobs:
            size = layer.get("size")
            stage = partial(_stage_layer, blobs, digest, size, staging)
            known = size if isinstance(size, int) else None
            draft.blobs[digest] = take(digest, known, stage) if take else stage()
    return draft


def _stage_layer(blobs: Blobs, digest: str, size: object, staging: Path) -> Path:
    return _stage(blobs, _blob_name(digest), staging, digest, size)[1]


def _choose(blobs: Blobs, descriptors: list[dict[str, Any]], architecture: str, depth: int = 0) -> dict[str, Any]:
    """The one manifest to take: attestations are left out, indexes are entered."""
    found: dict[str, dict[str, Any]] = {}
    others: set[str] = set()
    for descriptor in _plainest(descriptors, architecture):
        platform_of = _object(descriptor, "platform")
        named, system = platform_of.get("architecture", architecture), platform_of.get("os", "linux")
        if named != architecture or system != "linux":
            others.add(str(named) if system == "linux" else f"{system}/{named}")
            continue
        if descriptor.get("mediaType") in INDEX_TYPES and depth < 3:
            nested = parse_document(_read_checked(blobs, descriptor), "index")
            descriptor = _choose(blobs, _list(nested, "manifests"), architecture, depth + 1)
        found[_digest(descriptor)] = descriptor
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        has = ", ".join(sorted(others - {"unknown/unknown"})) or "no image"
        raise ImageError(
            f"the source has no image for {architecture}; it has {has}",
            hint=f"get the {architecture} variant, for example with `skopeo copy --override-arch`",
            cause="wrong_architecture",
        )
    names = sorted(
        str(_object(d, "annotations").get("org.opencontainers.image.ref.name", key[:19]))
        for key, d in found.items()
    )
    raise ImageError(
        f"the source holds {len(found)} images: {', '.join(names)}",
        hint="copy the one that is meant into a layout of its own with `skopeo copy`",
    )


def _plainest(descriptors: list[dict[str, Any]], architecture: str) -> list[dict[str, Any]]:
    """Without newer variants (amd64 v3) of an architecture that is there plainly, and runs everywhere."""

    def variant(descriptor: dict[str, Any]) -> str | None:
        platform_of = _object(descriptor, "platform")
        return platform_of.get("variant") if platform_of.get("architecture") == architecture else None

    plain = [d for d in descriptors if variant(d) in (None, "", "v1", "v8")]  # v8: what arm64 is
    named = [_object(d, "platform").get("architecture") for d in plain]
    return plain if architecture in named else descriptors


def _from_docker(blobs: Blobs, staging: Path, architecture: str) -> Draft:
    """`docker save` before version 25; there the layers have no digests, so they are made here."""
    try:
        found = json.loads(_read(blobs, "manifest.json"))
    except (ValueError, RecursionError) as e:
        raise ImageError(f"the manifest.json of the docker archive is not JSON: {e}") from e
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise ImageError(
            "the docker archive does not hold exactly one image",
            hint="save one image at a time with `docker save`",
        )
    image = found[0]
    raw = _read(blobs, str(image.get("Config")))
    config = parse_document(raw, "configuration")
    _check_architecture(config, architecture)
    draft = Draft(b"", config)
    layers = []
    names = image.get("Layers")
    diff_ids = _object(config, "rootfs").get("diff_ids") or []
    if not isinstance(names, list) or not isinstance(diff_ids, list):
        raise ImageError("the docker archive has no usable list of layers")
    if len(names) > MAX_LAYERS or len(diff_ids) not in (0, len(names)):
        raise ImageError("the docker archive has no usable list of layers")
    for number, name in enumerate(map(str, names)):
        digest, path, start = _stage(blobs, name, staging)
        if diff_ids and not is_compressed(start) and digest != diff_ids[number]:
            raise _mismatch(name, str(diff_ids[number]), digest)
        draft.blobs[digest] = path
        layers.append({"mediaType": layer_type(start), "digest": digest, "size": path.stat().st_size})
    _add_manifest(draft, raw, layers, staging)
    return draft


def _from_rootfs(file: IO[bytes], staging: Path, config: ImageConfig, architecture: str) -> Draft:
    """A plain tar of a root filesystem becomes an image of one layer."""

    class Whole:
        def open(self, name: str) -> IO[bytes] | None:
            return file

        def size(self, name: str) -> int:
            return os.fstat(file.fileno()).st_size

    digest, path, start = _stage(Whole(), "the tar", staging)
    document = {
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Env": [f"{key}={value}" for key, value in config.env.items()],
            "WorkingDir": config.workdir,
            "User": config.user,
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.cmd),
        },
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    draft = Draft(b"", document, {digest: path})
    layer = {"mediaType": layer_type(start), "digest": digest, "size": path.stat().st_size}
    _add_manifest(draft, encode(document), [layer], staging)
    return draft


def _add_manifest(draft: Draft, config: bytes, layers: list[dict[str, Any]], staging: Path) -> None:
    descriptor = {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)}
    draft.manifest = encode(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": descriptor, "layers": layers}
    )
    for data in (config, draft.manifest):
        path = _staged(staging, digest_of(data))
        path.write_bytes(data)
        draft.blobs[digest_of(data)] = path


# --- an image's configuration --------------------------------------------------------------------


def image_config(document: Mapping[str, Any]) -> ImageConfig:
    """What the guest needs of an image's configuration document. Raises `ImageError`."""
    config = _object(document, "config")
    try:
        env = dict(item.partition("=")[::2] for item in _strings(config, "Env"))
        return ImageConfig(
            env=env,
            workdir=config.get("WorkingDir") or "/",
            user=config.get("User") or "",
            entrypoint=_strings(config, "Entrypoint"),
            cmd=_strings(config, "Cmd"),
            architecture=document.get("architecture") or "amd64",
        )
    except ValueError as e:
        raise ImageError("the image's configuration has a value of the wrong type", hint=str(e)) from e


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{key} is no list of strings")
    return tuple(found)


def declared_volumes(document: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(_object(_object(document, "config"), "Volumes")))


def declared_healthcheck(document: Mapping[str, Any]) -> tuple[str, ...]:
    test = _object(_object(document, "config"), "Healthcheck").get("Test")
    return tuple(map(str, test)) if isinstance(test, list) else ()


def _check_architecture(config: Mapping[str, Any], architecture: str) -> None:
    has = config.get("architecture")
    if has != architecture or config.get("os", "linux") != "linux":
        raise ImageError(
            f"the image is for {config.get('os', 'linux')}/{has}; guests here are linux/{architecture}",
            hint=f"get the {architecture} variant, for example with `skopeo copy --override-arch`",
            cause="wrong_architecture",
        )


# --- reading blobs -------------------------------------------------------------------------------


def _stage(
    blobs: Blobs, name: str, staging: Path, digest: str | None = None, size: object = None
) -> tuple[str, Path, bytes]:
    """Copy a blob, hashing it; returns its digest, its place and its first bytes."""
    stream = blobs.open(name)
    if stream is None:
        raise ImageError(f"{digest or name} is missing in the source", hint="copy or save the image again")
    part = staging / "part"
    seen = hashlib.sha256()
    start = b""
    with stream, part.open("wb") as out:
        if size is not None and size != blobs.size(name):
            raise ImageError(f"{digest or name} has {blobs.size(name)} bytes; the manifest says {size}")
        while chunk := stream.read(CHUNK):
            start = start or chunk[:8]
            seen.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    found = f"sha256:{seen.hexdigest()}"
    if digest is not None and found != digest:
        raise _mismatch(name, digest, found)
    part.rename(_staged(staging, found))
    return found, _staged(staging, found), start


def _stage_document(blobs: Blobs, descriptor: Mapping[str, Any], staging: Path) -> bytes:
    data = _read_checked(blobs, descriptor)
    _staged(staging, _digest(descriptor)).write_bytes(data)
    return data


def _read_checked(blobs: Blobs, descriptor: Mapping[str, Any]) -> bytes:
    digest = _digest(descriptor)
    data = _read(blobs, _blob_name(digest))
    if digest_of(data) != digest:
        raise _mismatch(_blob_name(digest), digest, digest_of(data))
    return data


def _read(blobs: Blobs, name: str) -> bytes:
    stream = blobs.open(name)
    if stream is None:
        raise ImageError(f"{name} is missing in the source", hint="copy or save the image again")
    data = b""
    with stream:
        while len(data) <= MAX_DOCUMENT and (chunk := stream.read(CHUNK)):  # a pipe gives what it has
            data += chunk
    if len(data) > MAX_DOCUMENT:
        raise ImageError(f"{name} has more than {MAX_DOCUMENT} bytes: too big for what it is")
    return data


def _document(blobs: Blobs, name: str) -> dict[str, Any]:
    return parse_document(_read(blobs, name), name)


def parse_document(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ImageError(f"the {what} of the image is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ImageError(f"the {what} of the image is not a JSON object")
    return document


def _list(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ImageError(f"the image has no usable list {key!r}", hint="Docker's schema 1 is not supported")
    if len(found) > MAX_LAYERS:
        raise ImageError(f"the image has {len(found)} {key}; at most {MAX_LAYERS} are taken")
    return found


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    if not isinstance(found, dict):
        raise ImageError(f"the image's manifest has no {key!r}", hint="Docker's schema 1 is not supported")
    return found


def _object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An optional JSON object; anything else counts as empty."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _digest(descriptor: Mapping[str, Any]) -> str:
    digest = str(descriptor.get("digest"))
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or value.strip("0123456789abcdef"):
        raise ImageError(f"{digest[:100]!r} is not a sha256 digest")
    return digest


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _staged(staging: Path, digest: str) -> Path:
    return staging / digest.removeprefix("sha256:")


def _mismatch(name: str, said: str, found: str) -> ImageError:
    return ImageError(
        f"{name} is damaged: its digest is {found}, not {said}",
        hint="copy or save the image again",
        cause="digest_mismatch",
    )


def _join(name: str, target: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / target).parts:
        if part == "..":
            parts = parts[:-1]
        elif part not in ("/", "."):
            parts.append(part)
    return "/".join(parts)


def walk_layers(manifest: bytes) -> Iterator[str]:
    """The digests of a manifest's layers, lowest first."""
    for layer in _list(parse_document(manifest, "manifest"), "layers"):
        yield _digest(layer)
