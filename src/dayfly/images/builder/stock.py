"""The disk of a builder VM: the builder's image, and the base images of one build ready to use in it.

Copying a base image into a guest and unpacking it there, by an emulated CPU, takes longer than most builds. So the
bases lie on the builder's own read-only disk, as what buildah calls an additional image store: each as one layer,
flattened on the host as the disks of tasks are. A build then begins where its FROM ends.

In an image that is built so, a base appears as one layer with an invented digest, its *mark*; `results.py` puts
the base's own layers in its place.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dayfly.errors import HostError, ImageError
from dayfly.images.builder.stored import StoredImage
from dayfly.images.layout import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, digest_of, encode
from dayfly.images.locks import lock_shared, locked, try_locked
from dayfly.images.squashfs import DISK_VIRTUAL_BYTES, build_disk, tool_version
from dayfly.images.tar import Entry, Kind, pad, read_entries
from dayfly.images.tree import Inode, Tree
from dayfly.model import Disk, ImageConfig

BASES = b"bases"
"""Folder of the additional image store on the disk, from the root."""
FORMAT = 2
KEPT_DISKS = 6
"""So many made disks stay; the one not used for longest goes first."""


@dataclass(frozen=True)
class Base:
    """A base image of a build."""

    written: str
    """As the Dockerfile names it, after its ARGs."""
    image: StoredImage

    @property
    def mark(self) -> str:
        """The digest that stands for the whole base image in what the guest builds."""
        return "sha256:" + hashlib.sha256(f"dayfly base {self.image.digest}".encode()).hexdigest()

    @property
    def guest_name(self) -> str:
        """What the guest knows the base as: the written name, as buildah makes it complete."""
        return complete_name(self.written)


def complete_name(written: str) -> str:
    """`python` → `docker.io/library/python:latest`; of a name with a tag and a digest, the tag goes."""
    name, _, digest = written.partition("@")
    first, slash, rest = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif first == "index.docker.io":
        name = f"docker.io/{rest}"
    elif first != "localhost" and "." not in first and ":" not in first:
        name = f"docker.io/{name}"
    host, _, rest = name.partition("/")
    path, _, tag = rest.partition(":")
    if host == "docker.io" and "/" not in path:
        path = f"library/{path}"
    return f"{host}/{path}@{digest}" if digest else f"{host}/{path}:{tag or 'latest'}"


@contextmanager
def builder_disk(folder: Path, builder: StoredImage, bases: Sequence[Base], *, timeout_s: float) -> Iterator[Disk]:
    """The disk of `builder` with `bases` on it, in `folder`; made now if it is not there, and kept while in use.

    Blocking. Raises `ImageError` for an image that cannot be one file tree, `HostError` for a full disk.
    """
    names = sorted({f"{b.image.digest} {b.guest_name}" for b in bases})
    parts = [str(FORMAT), tool_version(), builder.digest, *names]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    path = folder / f"{key}.squashfs"
    fd = None
    with locked(folder / f"{key}.lock", timeout_s, what="the builder's disk"):
        if not (path.exists() and path.stat().st_size == DISK_VIRTUAL_BYTES):
            _make(path, builder, bases, timeout_s)
        fd = lock_shared(path)
    if fd is None:
        raise HostError(f"{path} is being deleted", hint="run it again")
    try:
        os.utime(path)
        _drop_old(folder)
        yield Disk(path, f"key:{key}", ImageConfig(), "dayfly builder", builder.digest)
    finally:
        os.close(fd)


def _drop_old(folder: Path) -> None:
    with suppress(FileNotFoundError):
        disks = sorted(folder.glob("*.squashfs"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in disks[KEPT_DISKS:]:
            with try_locked(path) as idle:
                if idle:
                    path.unlink(missing_ok=True)


def _make(path: Path, builder: StoredImage, bases: Sequence[Base], timeout_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        staging = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-")))
        layers: list[int] = []
        tree = _read_tree(stack, builder, staging, layers)
        graft = _Graft(tree)
        unique = {b.image.digest: b for b in bases}
        for base in unique.values():
            graft.add_base(base, _read_tree(stack, base.image, staging, layers))
        named = {d: sorted({b.guest_name for b in bases if b.image.digest == d}) for d in unique}
        layers.append(graft.finish(stack, staging, [(b, named[d]) for d, b in unique.items()], len(layers)))
        made = staging / "disk"
        build_disk(tree, layers, made, timeout_s=timeout_s)
        made.chmod(0o444)
        made.rename(path)


def _read_tree(stack: ExitStack, image: StoredImage, staging: Path, layers: list[int]) -> Tree:
    """The image as one tree; its inflated layers are added to `layers`, to which the tree's inodes point."""
    tree, first = Tree(), len(layers)
    for digest in image.layers:
        file: IO[bytes] = stack.enter_context(image.open_layer(digest, staging))
        tree.apply(read_entries(file.fileno(), os.fstat(file.fileno()).st_size))
        layers.append(file.fileno())
    if first:
        _shift(tree.root, first)
    return tree


def _shift(root: Inode, by: int) -> None:
    seen: set[int] = set()
    todo = [root]
    while todo:
        inode = todo.pop()
        if id(inode) not in seen:  # a hard link is the same inode twice
            seen.add(id(inode))
            inode.layer += by
            todo.extend((inode.children or {}).values())


class _Graft:
    """Puts an additional image store into a tree: `overlay/`, `overlay-layers/` and `overlay-images/`."""

    def __init__(self, tree: Tree) -> None:
        self._root = _folder()
        assert tree.root.children is not None
        tree.root.children[BASES] = self._root
        self._content = bytearray()
        self._files: list[tuple[list[bytes], Entry]] = []

    def add_base(self, base: Base, tree: Tree) -> None:
        layer = self._below([b"overlay", base.mark.removeprefix("sha256:").encode()])
        assert layer.children is not None
        layer.children[b"diff"] = tree.root

    def finish(self, stack: ExitStack, staging: Path, bases: Sequence[tuple[Base, list[str]]], layer: int) -> int:
        """Write what describes the bases; returns the descriptor of the layer with these small files."""
        layers, images = [], []
        for base, names in bases:
            identity = base.mark.removeprefix("sha256:")
            link = identity[:26].upper()
            self._file([b"overlay", identity.encode(), b"link"], link.encode())
            self._link([b"overlay", b"l", link.encode()], f"../{identity}/diff".encode())
            layers.append({"id": identity, "created": _NEVER, "diff-digest": base.mark, "diff-size": 0})
            images.append(self._describe(base, names, identity))
        self._file([b"overlay-layers", b"layers.json"], encode_list(layers))
        self._file([b"overlay-layers", b"layers.lock"], b"")
        self._file([b"overlay-images", b"images.json"], encode_list(images))
        self._file([b"overlay-images", b"images.lock"], b"")
        file: IO[bytes] = stack.enter_context(_temporary(staging))
        file.write(self._content)
        file.flush()
        for path, entry in self._files:
            parent = self._below(path[:-1])
            assert parent.children is not None
            parent.children[path[-1]] = Inode(entry, layer)
        return file.fileno()

    def _describe(self, base: Base, names: list[str], layer: str) -> dict[str, Any]:
        """A base's manifest and configuration, as if it had one layer, and its record."""
        config = encode(one_layer_config(base))
        manifest = encode(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
                "layers": [{"mediaType": LAYER_TYPE, "digest": base.mark, "size": 0}],
            }
        )
        identity, digest = digest_of(config).removeprefix("sha256:"), digest_of(manifest)
        documents = {digest_of(config): config, f"manifest-{digest}": manifest, "manifest": manifest}
        for key, data in documents.items():
            name = key if key == "manifest" else "=" + base64.b64encode(key.encode()).decode()
            self._file([b"overlay-images", identity.encode(), name.encode()], data)
        return {
            "id": identity,
            "digest": digest,
            "names": names,
            "layer": layer,
            "metadata": "{}",
            "created": _NEVER,
            "big-data-names": list(documents),
            "big-data-sizes": {key: len(data) for key, data in documents.items()},
            "big-data-digests": {key: digest_of(data) for key, data in documents.items()},
        }

    def _below(self, path: Sequence[bytes]) -> Inode:
        folder = self._root
        for part in path:
            assert folder.children is not None
            folder = folder.children.setdefault(part, _folder())
        return folder

    def _file(self, path: list[bytes], data: bytes) -> None:
        entry = Entry(path[-1], Kind.FILE, mode=0o644, size=len(data), offset=len(self._content))
        self._content += pad(data)
        self._files.append((path, entry))

    def _link(self, path: list[bytes], target: bytes) -> None:
        self._files.append((path, Entry(path[-1], Kind.SYMLINK, mode=0o777, target=target)))


def _temporary(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


_NEVER = "2000-01-01T00:00:00Z"


def _folder() -> Inode:
    return Inode(Entry(b"", Kind.DIR), 0, {})


def encode_list(items: list[dict[str, Any]]) -> bytes:
    return b"[" + b",".join(encode(item) for item in items) + b"]"


def one_layer_config(base: Base) -> dict[str, Any]:
    """The base's configuration document with its mark as the only layer. Raises `ImageError`."""
    document = base.image.config
    settings = dict(document.get("config") or {})
    if settings.get("OnBuild"):
        raise ImageError(
            f"the base image {base.written} has ONBUILD instructions, which are not carried out here",
            hint="write what they do into the Dockerfile, or build with --builder host",
            cause="unsupported",
        )
    return {
        "architecture": document.get("architecture", "amd64"),
        "os": document.get("os", "linux"),
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [base.mark]},
        "history": [{"created": _NEVER, "created_by": f"base {base.image.digest}"}],
    }
