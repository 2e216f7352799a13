"""Images from Dockerfiles."""

from dayfly.images.builder.build import Built, ImageBuilder
from dayfly.images.builder.request import BuildRequest
from dayfly.images.builder.settings import BuildSettings, load_settings

__all__ = ["BuildRequest", "BuildSettings", "Built", "ImageBuilder", "load_settings"]
