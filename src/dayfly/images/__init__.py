"""Images: local sources to read-only disks; README.md says which file does what."""

from dayfly.images.store import Image, ImageInfo, ImageStore

__all__ = ["Image", "ImageInfo", "ImageStore"]
