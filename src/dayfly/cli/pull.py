"""`image pull` and `image inspect`: images from registries, and what is known of one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dayfly.cli.admin import image_app
from dayfly.cli.common import Json, Pull
from dayfly.cli.interrupts import run_interruptible
from dayfly.cli.output import put, put_json, put_table, say
from dayfly.errors import DayflyError, NotFoundError

if TYPE_CHECKING:
    from dayfly.images import ImageStore, PullPolicy, Registries, Watch


SHOWN_NAMES = 4


def register(app: typer.Typer) -> None:
    """The commands join `image` when this module is imported by the command line."""
    image_app.command("pull")(image_pull)
    image_app.command("inspect")(image_inspect)


@dataclass(frozen=True)
class _Wanted:
    name: str
    policy: PullPolicy


def image_pull(
    what: Annotated[list[str], typer.Argument(metavar="REF|TASKS...", help="Image names, or task folders.")],
    pull: Annotated[
        Pull | None,
        typer.Option("--pull", help="Default: always for a name, missing for the images of tasks."),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=64, help="Images at the same time.")] = 4,
    json: Json = False,
) -> None:
    """Pull images and make their disks; a line for each on standard error. Exit 4 when one fails."""
    wanted = list(_wanted(what, pull))
    rows = run_interruptible(lambda: _pull_all(wanted, at_once))
    if json:
        put_json({"schema_version": 1, "images": rows})
    else:
        for row in rows:
            put(f"{row['image']}  {row.get('digest', 'failed')}")
    if any("error" in row for row in rows):
        raise typer.Exit(4)


def _wanted(what: list[str], policy: Pull | None) -> Iterator[_Wanted]:
    """Each image once, in the order in which they are named."""
    seen: set[str] = set()
    for word in what:
        is_folder = Path(word).is_dir()
        if not is_folder and word.startswith((".", "/", "~")):
            raise NotFoundError(f"{word} does not exist", hint="name a task folder, or an image like python:3.13")
        names = _images_of_tasks(word) if is_folder else [word]
        chosen: PullPolicy = policy.value if policy else ("missing" if is_folder else "always")
        for name in names:
            if name not in seen:
                seen.add(name)
                yield _Wanted(name, chosen)


def _images_of_tasks(folder: str) -> list[str]:
    from dayfly.tasks import find_tasks, load_task

    tasks = [load_task(path, strict=False) for path in find_tasks([Path(folder)])]
    dockerfiles = [path for task in tasks for path in task.dockerfiles]
    if dockerfiles:
        say(f"{len(dockerfiles)} Dockerfile(s) in {folder} are left to `dayfly image build` or to the job")
    return [name for task in tasks for name in task.images]


async def _pull_all(wanted: list[_Wanted], at_once: int) -> list[dict[str, Any]]:
    """One that fails keeps no other from being pulled."""
    import anyio

    from dayfly.disks import in_thread
    from dayfly.images import ImageStore, Registries

    store, registries = ImageStore(), Registries()
    rows: list[dict[str, Any]] = [{"image": item.name} for item in wanted]
    limiter = anyio.CapacityLimiter(at_once)
    done = 0

    async def pull(item: _Wanted, row: dict[str, Any]) -> None:
        nonlocal done
        async with limiter:
            try:
                row |= await in_thread(partial(_pull_one, store, registries, item))
                line = _line(row)
            except DayflyError as error:
                row |= {"error": error.message, "cause": error.cause, "hint": error.hint}
                line = f"failed: {error.message}"
            done += 1
            say(f"[{done}/{len(wanted)}] {item.name}: {line}")
            for hint in str(row.get("hint") or "").splitlines():
                say(f"  hint: {hint}")

    async with anyio.create_task_group() as group:
        for item, row in zip(wanted, rows, strict=True):
            group.start_soon(pull, item, row)
    return rows


def _pull_one(store: ImageStore, registries: Registries, item: _Wanted, watch: Watch) -> dict[str, Any]:
    started = time.monotonic()
    watch.note = lambda text: say(f"{item.name}: {text}")
    image = store.pull(item.name, registries, policy=item.policy, watch=watch)
    disk = store.disk(image)
    return {
        "digest": image.digest,
        "downloaded_bytes": watch.fetched_bytes,
        "disk": disk.digest,
        "disk_bytes": store.describe(image.digest).disk_bytes,
        "seconds": round(time.monotonic() - started, 3),
    }


def _line(row: dict[str, Any]) -> str:
    how = f"{_mib(row['downloaded_bytes'])} downloaded" if row["downloaded_bytes"] else "nothing to download"
    return f"{how}, disk {_mib(row['disk_bytes'])}, {row['seconds']:.1f} s"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _some(names: Sequence[str]) -> str:
    """A base can be shared by hundreds; `--json` has them all."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def image_inspect(
    ref: Annotated[str, typer.Argument(metavar="REF", help="Name, or digest (its first 12 digits do).")],
    json: Json = False,
) -> None:
    """Show one image: configuration, layers and what shares them, disk, last use."""
    from dayfly.images import ImageStore

    found = ImageStore().describe(ref)
    if json:
        put_json({"schema_version": 1, **found.as_dict()})
        return
    config = found.config
    lines = {
        "names": ", ".join(found.names) or "none",
        "digest": found.digest,
        "created": found.created or "not said",
        "architecture": config.architecture,
        "user": config.user or "root",
        "workdir": config.workdir,
        "env": " ".join(f"{k}={v}" for k, v in config.env.items()) or "none",
        "entrypoint": " ".join(config.entrypoint) or "none",
        "cmd": " ".join(config.cmd) or "none",
        "volumes": ", ".join(found.volumes) or "none",
        "healthcheck": " ".join(found.healthcheck) + " (noted; a task has its own)"
        if found.healthcheck
        else "none",
        "disk": f"{_mib(found.disk_bytes)}  {found.disk_digest}" if found.disk_digest else "not made yet",
        "last use": time.strftime("%Y-%m-%d %H:%M", time.localtime(found.last_used)),
        "in use": "yes" if found.in_use else "no",
    }
    for key, value in lines.items():
        put(f"{key:<13} {value}")
    put()
    rows = [(layer.digest[:19], _mib(layer.bytes), _some(layer.shared_with)) for layer in found.layers]
    put_table(("layer", "size", "shared with"), rows, wrap="shared with")
