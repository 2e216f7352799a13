"""From what a builder VM hands over to an OCI layout that the store reads like any other: all of it is hostile.

Marks of base images (see `stock.py`) are replaced by the bases' own layers; new layers are looked through for
secrets.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayfly.errors import ImageError
from dayfly.images.builder.stock import Base
from dayfly.images.inflate import HashingReader, inflate
from dayfly.images.layout import CONFIG_TYPE, INDEX_TYPE, MANIFEST_TYPE, digest_of, encode, layer_type

MAX_DOCUMENT = 4 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass
class _Parts:
    layers: list[dict[str, Any]]
    diff_ids: list[str]
    history: list[dict[str, Any]]


def make_layout(
    source: Path,
    dest: Path,
    bases: Sequence[Base],
    secrets: Mapping[str, bytes],
    *,
    most: int,
    env: Sequence[str] = (),
) -> None:
    """Write the built image in the OCI layout `source` as one with its bases' layers to the new folder `dest`.

    Blocking; blobs are moved out of `source`. `secrets`: id → content; `most`: bytes that one layer may unpack to;
    `env`: names that were set for RUN only, of which the history must not speak.
    Raises `ImageError` for what is not well formed, and when a secret is in a layer or in the configuration.
    """
    _refuse_links(source)
    top = _document(source / "index.json", "the index").get("manifests")
    if not isinstance(top, list) or len(top) != 1 or not isinstance(top[0], dict):
        raise ImageError("the builder handed over something else than one image", hint="see the build log")
    manifest = _parse(_blob(source, top[0], "the manifest"), "the manifest")
    described = manifest.get("config")
    data = _blob(source, described if isinstance(described, dict) else {}, "the configuration")
    _refuse_secrets(_found_in(data, secrets), "the image's configuration")
    config = _parse(data, "the configuration")
    blobs = dest / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    parts = _put_layers(source, blobs, manifest, bases, secrets, most)
    config["rootfs"] = {"type": "layers", "diff_ids": parts.diff_ids}
    config["history"] = parts.history + _own_history(config, env)
    top = _add(
        blobs,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _add(blobs, config, CONFIG_TYPE),
            "layers": parts.layers,
        },
        MANIFEST_TYPE,
    )
    (dest / "index.json").write_bytes(encode({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [top]}))
    (dest / "oci-layout").write_bytes(encode({"imageLayoutVersion": "1.0.0"}))


def _put_layers(
    source: Path,
    blobs: Path,
    manifest: Mapping[str, Any],
    bases: Sequence[Base],
    secrets: Mapping[str, bytes],
    most: int,
) -> _Parts:
    listed = manifest.get("layers")
    if not isinstance(listed, list) or len(listed) > 500:
        raise ImageError("the built image's manifest has no usable list of layers")
    parts = _Parts([], [], [])
    marked, known = {b.mark: b for b in bases}, _known_layers(bases)
    for layer in listed:
        digest = _digest(layer if isinstance(layer, dict) else {})
        if (base := marked.get(digest)) is not None:
            _put_base(base, blobs, parts)
        else:
            _put_new(source, digest, most, blobs, parts, secrets, known)
    return parts


def _put_base(base: Base, blobs: Path, parts: _Parts) -> None:
    """The base's own layers, as they are in the store."""
    for layer in base.image.manifest["layers"]:
        _link_layer(base, layer, blobs, parts)
    parts.diff_ids += _diff_ids(base)
    history = base.image.config.get("history")
    parts.history += history if isinstance(history, list) else []


def _link_layer(base: Base, layer: Mapping[str, Any], blobs: Path, parts: _Parts) -> None:
    path = blobs / str(layer["digest"]).removeprefix("sha256:")
    if not path.exists():
        path.symlink_to(base.image.blob(str(layer["digest"])))
    parts.layers.append({key: layer[key] for key in ("mediaType", "digest", "size")})


def _diff_ids(base: Base) -> list[str]:
    """Digests of the plain layers. A root filesystem that was imported as a tar has none: it is its only layer."""
    rootfs = base.image.config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    layers = base.image.manifest["layers"]
    if isinstance(diff_ids, list) and len(diff_ids) == len(layers):
        return [str(d) for d in diff_ids]
    return [str(layer["digest"]) for layer in layers]


def _known_layers(bases: Sequence[Base]) -> dict[str, tuple[Base, Mapping[str, Any]]]:
    """Digest of a base's plain layer → the layer as the store has it; this host's buildah packs them anew."""
    return {
        plain: (base, layer)
        for base in bases
        for plain, layer in zip(_diff_ids(base), base.image.manifest["layers"], strict=False)
    }


def _put_new(
    source: Path,
    digest: str,
    most: int,
    blobs: Path,
    parts: _Parts,
    secrets: Mapping[str, bytes],
    known: Mapping[str, tuple[Base, Mapping[str, Any]]],
) -> None:
    """A layer that the build made, kept as it came when its digest is right and no secret is in it."""
    plain, search = hashlib.sha256(), _Search(secrets)
    path = source / "blobs" / "sha256" / digest.removeprefix("sha256:")
    try:
        file = path.open("rb")
    except OSError:
        raise ImageError(f"the layer {digest} of the built image is missing", hint="build it again") from None
    with file:
        start = file.read(8)
        file.seek(0)
        reader = HashingReader(file)
        for chunk in inflate(reader, start, most):
            plain.update(chunk)
            search.add(chunk)
        reader.drain()
    if reader.digest != digest:
        raise ImageError(f"the layer {digest} of the built image is damaged", cause="digest_mismatch")
    parts.diff_ids.append(f"sha256:{plain.hexdigest()}")
    if parts.diff_ids[-1] in known:
        _link_layer(*known[parts.diff_ids[-1]], blobs, parts)
        return
    _refuse_secrets(search.found, "a layer of the image")
    parts.layers.append({"mediaType": layer_type(start), "digest": digest, "size": path.stat().st_size})
    path.rename(blobs / digest.removeprefix("sha256:"))


def _own_history(config: Mapping[str, Any], env: Sequence[str]) -> list[dict[str, Any]]:
    """What the build added to the history, without the lines that stand for the base and for `env`."""
    listed = config.get("history")
    steps = [dict(h) for h in listed if isinstance(h, dict)] if isinstance(listed, list) else []
    ours = tuple(f'/bin/sh -c #(nop) ENV "{name}"=' for name in env)
    said = [str(step.get("created_by", "")) for step in steps]
    return [
        step
        for number, (step, by) in enumerate(zip(steps, said, strict=True))
        if not (number == 0 and by.startswith("base ")) and not (ours and by.startswith(ours))
    ]


# --- secrets -------------------------------------------------------------------------------------

SHORTEST_SECRET = 6
"""Bytes; shorter ones would be found everywhere."""


def secret_needles(secrets: Mapping[str, bytes]) -> dict[str, bytes]:
    """What to look for: contents without white space around them, long enough to mean something."""
    stripped = {name: content.strip() for name, content in secrets.items()}
    return {name: content for name, content in stripped.items() if len(content) >= SHORTEST_SECRET}


class _Search:
    """Looks for byte strings in a stream."""

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        self._needles = secret_needles(secrets)
        self._overlap = max((len(n) for n in self._needles.values()), default=1) - 1
        self._tail = b""
        self.found: list[str] = []

    def add(self, chunk: bytes) -> None:
        if not self._needles:
            return
        text = self._tail + chunk
        self.found += [n for n, needle in self._needles.items() if n not in self.found and needle in text]
        self._tail = text[-self._overlap :] if self._overlap else b""


def _found_in(data: bytes, secrets: Mapping[str, bytes]) -> list[str]:
    search = _Search(secrets)
    search.add(data)
    return search.found


def _refuse_secrets(found: Sequence[str], where: str) -> None:
    if found:
        raise ImageError(
            f"the build secret {found[0]!r} ended in {where}; the image was thrown away",
            hint="use it where RUN --mount=type=secret puts it, and write it nowhere",
            cause="secret_leaked",
        )


# --- reading -------------------------------------------------------------------------------------


def _refuse_links(source: Path) -> None:
    """A link in a guest's files could point to a file of this host."""
    for folder, folders, files in os.walk(source):
        for name in (*folders, *files):
            if (Path(folder) / name).is_symlink():
                raise ImageError("the builder handed over a link in place of a file", hint="see the build log")


def _add(blobs: Path, document: Mapping[str, Any], media_type: str) -> dict[str, Any]:
    data = encode(document)
    (blobs / digest_of(data).removeprefix("sha256:")).write_bytes(data)
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _digest(descriptor: Mapping[str, Any]) -> str:
    digest = descriptor.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ImageError("the built image's manifest names a blob without a usable digest")
    return digest


def _blob(source: Path, descriptor: Mapping[str, Any], what: str) -> bytes:
    digest = _digest(descriptor)
    data = _read(source / "blobs" / "sha256" / digest.removeprefix("sha256:"), what)
    if digest_of(data) != digest:
        raise ImageError(f"{what} of the built image is damaged", cause="digest_mismatch")
    return data


def _document(path: Path, what: str) -> dict[str, Any]:
    return _parse(_read(path, what), what)


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT + 1)
    except OSError:
        raise ImageError(f"{what} of the built image is missing", hint="see the build log") from None
    if len(data) > MAX_DOCUMENT:
        raise ImageError(f"{what} of the built image has more than {MAX_DOCUMENT} bytes")
    return data


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.load(io.BytesIO(data))
    except (ValueError, RecursionError) as e:
        raise ImageError(f"{what} of the built image is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ImageError(f"{what} of the built image is not a JSON object")
    return document
