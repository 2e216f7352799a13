"""An image of the store with its documents and layers at hand, for builds on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dayfly.errors import ConfigError, NotFoundError
from dayfly.images.names import parse_reference
from dayfly.images.sources import MAX_IMAGE
from dayfly.images.store import Image, ImageStore, _write


@dataclass(frozen=True)
class StoredImage:
    """Friend of `ImageStore`: reads what lies in it, by digest, and changes nothing."""

    store: ImageStore
    image: Image
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    """The whole configuration document."""

    @property
    def digest(self) -> str:
        return self.image.digest

    @property
    def layers(self) -> tuple[str, ...]:
        return self.image.layers

    def open_layer(self, digest: str, staging: Path) -> AbstractContextManager[IO[bytes]]:
        """A layer as an inflated file, compared with its digest. Raises `ImageError`."""
        return self.store._open_layer(digest, staging, MAX_IMAGE)

    def blob(self, digest: str) -> Path:
        return self.store._blob(digest)


def stored(store: ImageStore, image: Image) -> StoredImage:
    """Raises `ImageError` for documents that are damaged."""
    return StoredImage(store, image, store._document(image.digest), store._config_document(image.digest))


def find_image(store: ImageStore, name: str) -> Image | None:
    """The image of that name if it is in the store; nothing is pulled."""
    if store._find(parse_reference(name)) is None:
        return None
    try:
        return store.resolve(name)
    except NotFoundError:
        return None


def add_name(store: ImageStore, image: Image, name: str) -> None:
    """Give an image of the store a further name; one that is taken moves. Raises `ConfigError` for a bad name."""
    reference = parse_reference(name)
    if not reference.name or reference.digest:
        raise ConfigError(f"an image is kept under a name, not {name!r}", hint="write name[:tag]")
    with store._changing():
        _write(store._name_file(reference.name), {"digest": image.digest})
