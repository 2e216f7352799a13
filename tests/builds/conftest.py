"""One builder for all tests of this folder: real microVMs, the image of the demo as base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.errors import NotFoundError
from dayfly.images import ImageStore
from dayfly.images.builder import BuildRequest, BuildSettings, Built, ImageBuilder
from dayfly.registry import HypervisorSettings, make_hypervisor

SMALL = BuildSettings(cpus=1, memory_mb=768, storage_mb=1024, network="none")


@pytest.fixture(scope="session")
def hypervisor():
    return make_hypervisor("qemu", HypervisorSettings())


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    """A folder with a Dockerfile and files; what is in it differs each time, so nothing was built before."""

    def make(dockerfile: str, files: dict[str, str] | None = None, name: str = "context") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "Dockerfile").write_text(dockerfile)
        for path, text in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


@pytest.fixture
def build(base_disk, hypervisor, forget) -> Callable[..., Built]:
    """Build a folder; the output comes back in `output`, a bytearray, if one is given."""

    def run(
        folder: Path,
        settings: BuildSettings = SMALL,
        output: bytearray | None = None,
        builder: ImageBuilder | None = None,
        renew: bool = True,
        **request: Any,
    ) -> Built:
        taken = bytearray() if output is None else output
        made = builder or ImageBuilder(ImageStore(), lambda: hypervisor, settings, on_output=taken.extend)
        wanted = BuildRequest(folder / "Dockerfile", folder, **{"timeout_s": 240.0, **request})

        async def main() -> Built:
            with anyio.fail_after(600):
                return await made.build(wanted, renew=renew)

        built = anyio.run(main)
        forget(built.image.digest)
        return built

    return run


@pytest.fixture
def forget() -> Iterator[Callable[[str], None]]:
    """Images that a test made leave the user's store with it."""
    digests: set[str] = set()
    yield digests.add
    for digest in digests:
        with suppress(NotFoundError):
            ImageStore().remove(digest)
