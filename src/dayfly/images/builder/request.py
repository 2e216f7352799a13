"""What is to be built, read and made exact: instructions, context, base images, and the key of it all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dayfly.errors import ImageError, NotFoundError
from dayfly.images.builder.context import BuildContext, ignore_file, read_context
from dayfly.images.builder.dockerfile import MAX_SIZE, Instruction, images_of, parse_dockerfile
from dayfly.images.builder.stock import Base
from dayfly.images.builder.stored import stored
from dayfly.images.layout import encode
from dayfly.images.sources import host_architecture
from dayfly.images.store import Image, ImageStore

FORMAT = 1
"""Counted up when the same files would give another image for a reason that is ours."""
MAX_SECRET = 1 << 20


@dataclass(frozen=True)
class BuildRequest:
    """One image wanted."""

    dockerfile: Path
    context: Path
    """The folder that COPY takes from."""
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Id → file, for `RUN --mount=type=secret,id=…`. In no layer, no log and no key."""
    target: str | None = None
    timeout_s: float = 600.0
    layers: bool = False
    """Keep what each instruction made, for the next build of this Dockerfile; the first one takes longer."""


@dataclass(frozen=True)
class BuildPlan:
    """A request with everything it depends on."""

    request: BuildRequest
    text: bytes
    instructions: tuple[Instruction, ...]
    context: BuildContext
    bases: tuple[Base, ...]
    secrets: Mapping[str, bytes]
    env: Mapping[str, str]
    """For RUN, and in no layer. Not in the key: what a host needs for its network makes no other image."""
    key: str
    """64 hex digits: equal for equal files, arguments, bases and builder."""

    @property
    def added_steps(self) -> int:
        """`env` appears as a further instruction of each stage."""
        return 1 if self.env else 0

    @property
    def image_name(self) -> str:
        """Under which the image is kept in the store."""
        return f"dayfly/build:{self.key[:32]}"


def read_request(
    request: BuildRequest,
    store: ImageStore,
    resolve: Callable[[str], Image],
    builder: str,
    env: Mapping[str, str],
) -> BuildPlan:
    """Read the files and find the base images. Blocking. `builder`: what says which builder it is.

    Raises `ImageError` and what `resolve` raises.
    """
    text = _read(request.dockerfile, MAX_SIZE)
    instructions = parse_dockerfile(text.decode("utf-8", "surrogateescape"))
    context = read_context(request.context, ignore_file(request.dockerfile, request.context))
    bases = tuple(
        Base(name, stored(store, _resolved(name, resolve, request)))
        for name in images_of(instructions, request.args)
    )
    key = hashlib.sha256(
        encode(
            {
                "format": FORMAT,
                "dockerfile": hashlib.sha256(text).hexdigest(),
                "context": context.digest,
                "args": dict(sorted(request.args.items())),
                "target": request.target,
                "secrets": sorted(request.secrets),
                "bases": {b.written: b.image.digest for b in bases},
                "builder": builder,
                "architecture": host_architecture(),
            }
        )
    ).hexdigest()
    secrets = {name: _read(path, MAX_SECRET) for name, path in request.secrets.items()}
    return BuildPlan(request, text, instructions, context, bases, secrets, env, key)


def _resolved(name: str, resolve: Callable[[str], Image], request: BuildRequest) -> Image:
    try:
        return resolve(name)
    except NotFoundError as e:
        raise ImageError(f"{request.dockerfile}: the base image {name} is not there", hint=e.hint) from e


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as e:
        raise ImageError(f"{path} cannot be read: {e.strerror}", hint="give the path of a file") from e
    if len(data) > most:
        raise ImageError(f"{path} has more than {most} bytes", hint="is this the right file?")
    return data
