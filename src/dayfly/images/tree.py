"""Layers applied in memory: what `umoci unpack` would leave on disk, without a disk.

Names point to inodes, as in a file system, so a hard link outlives a deletion of the name that it was made
from, and a parent that is a symbolic link leads where it would lead below the image's root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dayfly.errors import ImageError
from dayfly.images.tar import Entry, Kind

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
MAX_LINKS_FOLLOWED = 40  # as the kernel


@dataclass(slots=True, eq=False)
class Inode:
    entry: Entry
    layer: int
    """Index of the layer that the content is in."""
    children: dict[bytes, Inode] | None = None
    """Of a folder."""


def _new_folder(entry: Entry | None = None) -> Inode:
    return Inode(entry or Entry(b"", Kind.DIR), 0, {})


class Tree:
    """A file tree to which layers are applied, lowest first."""

    def __init__(self) -> None:
        self.root = _new_folder()
        self._layer = -1
        self._touched: set[bytes] = set()

    def apply(self, entries: Iterable[Entry]) -> None:
        """Apply the next layer. Raises `ImageError`."""
        self._layer += 1
        self._touched = set()
        for entry in entries:
            try:
                self._apply(entry)
            except ImageError as e:
                raise ImageError(f"layer {self._layer + 1}: {e.message}", hint=e.hint, cause=e.cause) from e

    def walk(self) -> Iterator[tuple[Entry, int]]:
        """Every path as an entry with the layer that has its content; folders first, then sorted by name.

        The first path of an inode is the file, each further one a hard link to it.
        """
        first: dict[int, bytes] = {}
        todo = [(b"", self.root)]
        while todo:
            path, inode = todo.pop()
            if inode.children is not None:
                yield replace(inode.entry, name=path), inode.layer
                prefix = path + b"/" if path else b""
                todo += [(prefix + name, inode.children[name]) for name in sorted(inode.children, reverse=True)]
            elif id(inode) in first:
                yield Entry(path, Kind.HARDLINK, target=first[id(inode)]), inode.layer
            else:
                first[id(inode)] = path
                yield replace(inode.entry, name=path), inode.layer

    def _apply(self, entry: Entry) -> None:
        if not entry.name:
            self.root.entry = _kept(entry)
            return
        *parents, last = entry.name.split(b"/")
        if last.startswith(WHITEOUT):
            self._white_out(parents, last)
        elif _is_overlay_whiteout(entry):
            self._white_out(parents, WHITEOUT + last)
        else:
            folder, path = self._enter(parents)
            self._place(folder, last, entry)
            self._touch([*path, last])

    def _place(self, folder: Inode, name: bytes, entry: Entry) -> None:
        assert folder.children is not None
        old = folder.children.get(name)
        if entry.kind is Kind.HARDLINK:
            folder.children[name] = self._find(entry)
        elif entry.kind is Kind.DIR and old is not None and old.children is not None:
            old.entry = _kept(entry)  # a folder is merged into the one below
        elif entry.kind is Kind.DIR:
            folder.children[name] = _new_folder(_kept(entry))
        else:
            folder.children[name] = Inode(_kept(entry), self._layer)

    def _find(self, link: Entry) -> Inode:
        """The inode that a hard link names; the last component is not followed."""
        *parents, last = link.target.split(b"/")
        found = self._look(parents)
        inode = found[0].children.get(last) if found and found[0].children is not None else None
        if inode is None or inode.children is not None:
            what = "a folder" if inode else "not there"
            raise ImageError(f"the hard link {link.name!r} points to {link.target!r}, which is {what}")
        return inode

    def _white_out(self, parents: list[bytes], last: bytes) -> None:
        if last != OPAQUE and last.startswith(WHITEOUT + WHITEOUT):
            return  # bookkeeping of aufs
        found = self._look(parents)
        if found is None:
            return
        folder, path = found
        if last == OPAQUE:
            self._clear(folder, path)
            return
        assert folder.children is not None
        name = last.removeprefix(WHITEOUT)
        child = folder.children.get(name)
        if b"/".join([*path, name]) not in self._touched:
            folder.children.pop(name, None)
        elif child is not None:
            self._clear(child, [*path, name])

    def _clear(self, folder: Inode, path: list[bytes]) -> None:
        """Drop what lower layers put below `folder`; what this layer has put there already stays."""
        todo = [(folder, b"".join(part + b"/" for part in path))]
        while todo:
            inode, prefix = todo.pop()
            for name, child in list((inode.children or {}).items()):
                assert inode.children is not None
                if prefix + name not in self._touched:
                    del inode.children[name]
                else:
                    todo.append((child, prefix + name + b"/"))

    def _touch(self, path: list[bytes]) -> None:
        while path and (name := b"/".join(path)) not in self._touched:
            self._touched.add(name)
            path = path[:-1]

    def _enter(self, parts: list[bytes]) -> tuple[Inode, list[bytes]]:
        """The folder at `parts`, made if it is not there."""
        found = self._look(parts, make=True)
        assert found is not None
        return found

    def _look(self, parts: list[bytes], *, make: bool = False) -> tuple[Inode, list[bytes]] | None:
        """The folder at `parts` and its real path; symbolic links are followed and end at the root."""
        chain, path = [self.root], list[bytes]()
        todo = deque(parts)
        followed = 0
        while todo:
            part = todo.popleft()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if path:
                    chain.pop()
                    path.pop()
                continue
            children = chain[-1].children
            assert children is not None
            child = children.get(part)
            if child is None:
                if not make:
                    return None
                child = children[part] = _new_folder()
            if child.entry.kind is Kind.SYMLINK:
                followed += 1
                if followed > MAX_LINKS_FOLLOWED:
                    raise ImageError(f"too many symbolic links on the way to {b'/'.join(parts)!r}")
                if child.entry.target.startswith(b"/"):
                    chain, path = [self.root], []
                todo.extendleft(reversed(child.entry.target.split(b"/")))
                continue
            if child.children is None:
                if not make:
                    return None
                raise ImageError(f"{b'/'.join([*path, part])!r} is no folder, yet an entry lies below it")
            chain.append(child)
            path.append(part)
        return chain[-1], path


def _is_overlay_whiteout(entry: Entry) -> bool:
    # How overlayfs itself writes a deletion; some builders leak it into a layer.
    return entry.kind is Kind.CHAR and entry.device == (0, 0)


def _kept(entry: Entry) -> Entry:
    """`entry` with the xattrs that an image may bring.

    `trusted.` and `user.overlay.` would be orders to the guest's overlayfs; ACLs (`system.`) cannot be
    stored in squashfs.
    """
    xattrs = tuple(
        (key, value)
        for key, value in entry.xattrs
        if key.startswith((b"user.", b"security.")) and not key.startswith(b"user.overlay.")
    )
    return replace(entry, xattrs=xattrs)
