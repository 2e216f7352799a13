"""Images: local sources and registries to read-only disks; README.md says which file does what."""

from dayfly.images.registry import Registries
from dayfly.images.skopeo import PullLimits, Watch
from dayfly.images.store import Image, ImageInfo, ImageStore, PullPolicy

__all__ = ["Image", "ImageInfo", "ImageStore", "PullLimits", "PullPolicy", "Registries", "Watch"]
