"""An image of the store with its documents and layers at hand, for builds on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dayfly.images.sources import MAX_IMAGE
from dayfly.images.store import Image, ImageStore


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
