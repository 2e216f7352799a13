"""Writing an OCI image layout: what `import_image` keeps, and what tests make small images with."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dayfly.images.inflate import inflate

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"

_COMPRESSION = ((b"\x1f\x8b", "+gzip"), (b"\x28\xb5\x2f\xfd", "+zstd"))


def digest_of(data: bytes) -> str:
    """sha256:… of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer_type(start: bytes) -> str:
    """The OCI media type of a layer, by its first bytes: plain tar, gzip or zstd."""
    for magic, suffix in _COMPRESSION:
        if start.startswith(magic):
            return LAYER_TYPE + suffix
    return LAYER_TYPE


def encode(document: Mapping[str, Any]) -> bytes:
    """JSON with one spelling, so that the same content has the same digest."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _diff_id(layer: bytes) -> str:
    return digest_of(b"".join(inflate(io.BytesIO(layer), layer[:8], 1 << 34)))


def make_oci_layout(
    dest: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    *,
    architecture: str = "amd64",
    name: str = "latest",
) -> str:
    """Write an image of `layers` (tar bytes, lowest first; plain, gzip or zstd) as an OCI layout in `dest`.

    `config` is the image's `config` object: `Env`, `WorkingDir`, `User`, `Entrypoint`, `Cmd`.
    Returns the digest of the manifest. The same arguments give the same bytes.
    """
    blobs = dest / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def add(data: bytes, media_type: str) -> dict[str, Any]:
        digest = digest_of(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    image = {"architecture": architecture, "os": "linux", "config": dict(config or {})}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": add(
            encode(image | {"rootfs": {"type": "layers", "diff_ids": [_diff_id(layer) for layer in layers]}}),
            CONFIG_TYPE,
        ),
        "layers": [add(layer, layer_type(layer)) for layer in layers],
    }
    top = add(encode(manifest), MANIFEST_TYPE)
    top["annotations"] = {"org.opencontainers.image.ref.name": name}
    (dest / "index.json").write_bytes(encode({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [top]}))
    (dest / "oci-layout").write_bytes(encode({"imageLayoutVersion": "1.0.0"}))
    return str(top["digest"])
