"""The cache of templates: built once, checked, rebuilt, pruned; without a VM."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from dayfly.hypervisors.qemu.template import Template, TemplateStore, key_digest
from dayfly.process import run_async

pytestmark = pytest.mark.anyio

RAM = 4 * 1024 * 1024
PARTS = {"qemu": "7.2", "cpus": 1}


def builder(built: list[bytes], content: bytes = b"ram") -> Callable[[int, int], Awaitable[None]]:
    async def build(ram: int, state: int) -> None:
        await anyio.sleep(0.01)
        os.pwrite(ram, content, 8192)
        os.pwrite(ram, bytes(4096), 40960)  # a page that was used and is zero again
        os.pwrite(state, b"devices", 0)
        built.append(content)

    return build


async def get(store: TemplateStore, built: list[bytes], parts: dict[str, object] | None = None) -> Template:
    return await store.get(parts or dict(PARTS), RAM, builder(built), 10)


def content(template: Template) -> tuple[bytes, int, bytes]:
    with template.open_state() as state:
        return os.pread(template.ram, 3, 8192), os.fstat(template.ram).st_size, os.read(state, 100)


async def test_a_template_is_built_once_and_then_loaded(tmp_path: Path) -> None:
    built: list[bytes] = []
    first = await get(TemplateStore(tmp_path), built)
    second = await get(TemplateStore(tmp_path), built)
    assert built == [b"ram"]
    assert content(first) == content(second) == (b"ram", RAM, b"devices")
    assert first.created_unix == second.created_unix
    first.close()
    second.close()


async def test_every_part_of_the_key_counts(tmp_path: Path) -> None:
    built: list[bytes] = []
    for parts in ({"qemu": "7.2", "cpus": 1}, {"qemu": "7.3", "cpus": 1}, {"qemu": "7.2", "cpus": 2}):
        (await get(TemplateStore(tmp_path), built, parts)).close()
    assert len(built) == 3
    assert key_digest({"a": 1, "b": 2}) == key_digest({"b": 2, "a": 1})


async def test_nobody_can_write_the_ram_of_a_template(tmp_path: Path) -> None:
    template = await get(TemplateStore(tmp_path), [])
    with pytest.raises(PermissionError):
        os.pwrite(template.ram, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(template.ram, 0)
    template.close()


async def test_pages_of_zeros_take_no_room(tmp_path: Path) -> None:
    template = await get(TemplateStore(tmp_path), [])
    assert os.fstat(template.ram).st_blocks * 512 == 4096
    template.close()


@pytest.mark.parametrize("name", ["ram", "state", "meta.json"])
@pytest.mark.parametrize("how", ["truncate", "change", "remove"])
async def test_a_broken_template_is_built_again(tmp_path: Path, name: str, how: str) -> None:
    built: list[bytes] = []
    store = TemplateStore(tmp_path)
    (await get(store, built)).close()
    broken = tmp_path / key_digest(PARTS).removeprefix("sha256:") / name
    data = broken.read_bytes()
    if how == "remove":
        broken.unlink()
    elif how == "truncate":
        broken.write_bytes(data[: len(data) // 2])
    else:
        broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    template = await get(store, built)
    assert len(built) == 2
    assert content(template) == (b"ram", RAM, b"devices")
    template.close()


async def test_a_build_that_fails_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    async def fail(ram: int, state: int) -> None:
        raise RuntimeError("no boot")

    store = TemplateStore(tmp_path)
    with pytest.raises(RuntimeError, match="no boot"):
        await store.get(dict(PARTS), RAM, fail, 10)
    assert store.listing() == []
    (await get(store, [])).close()


async def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    stage = tmp_path / f".{key_digest(PARTS).removeprefix('sha256:')[:16]}-abc"
    stage.mkdir()
    (stage / "ram").write_bytes(b"half")
    (await get(TemplateStore(tmp_path), [])).close()
    assert not stage.exists()


async def test_prune_spares_what_is_in_use(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    used = await get(store, [], {"cpus": 1})
    (await get(store, [], {"cpus": 2})).close()
    assert {(i.digest == used.digest, i.in_use) for i in store.listing()} == {(True, True), (False, False)}
    assert store.prune(unused_for_s=3600) == []
    assert store.prune() == [key_digest({"cpus": 2})]
    assert store.prune() == []
    used.close()
    assert store.prune() == [used.digest]
    assert list(tmp_path.iterdir()) == []


TWO = """
import asyncio, os, sys
from pathlib import Path
import anyio
from dayfly.hypervisors.qemu.template import TemplateStore
folder, log = Path(sys.argv[1]), Path(sys.argv[2])

async def build(ram, state):
    with log.open("a") as f:
        f.write("built\\n")
    await anyio.sleep(0.3)
    os.pwrite(ram, b"ram", 8192)
    os.pwrite(state, b"devices", 0)

async def main():
    t = await TemplateStore(folder).get({"qemu": "7.2", "cpus": 1}, 4 << 20, build, 20)
    assert os.pread(t.ram, 3, 8192) == b"ram"
    t.close()

anyio.run(main)
"""


async def test_two_processes_at_once_build_once_and_both_have_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            argv = [sys.executable, "-c", TWO, tmp_path / "templates", log]
            tasks.start_soon(lambda argv=argv: run_async(argv, timeout_s=60))
    assert log.read_text() == "built\n"
