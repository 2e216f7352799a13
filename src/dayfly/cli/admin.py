"""`doctor`, `image`, `template` and `gc`: the state of this host."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json, put_json, say
from dayfly.evidence import JobFolder, remove_half_made

image_app = typer.Typer(help="Images on this host.", no_args_is_help=True)
template_app = typer.Typer(help="Saved states that VMs are forked from.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(gc)
    app.add_typer(image_app, name="image")
    app.add_typer(template_app, name="template")


def doctor(as_json: Json = False) -> None:
    """Check this host; each line is ok, warn or fail, with what to do. Exit 4 when something fails."""
    from dayfly.doctor import checks

    found = checks()
    if as_json:
        put_json({"schema_version": 1, "checks": [vars(c) for c in found]})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        table = Table.grid(padding=(0, 2))
        for check in found:
            table.add_row(f"[{colours[check.status]}]{check.status}[/]", check.name, check.detail)
            if check.fix and check.status != "ok":
                table.add_row("", "", f"→ {check.fix}")
        Console().print(table)
    if any(c.status == "fail" for c in found):
        raise typer.Exit(4)


def _ago(unix: float | None) -> str:
    if not unix:
        return "never"
    seconds = max(0.0, time.time() - unix)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


@image_app.command("import")
def image_import(
    source: Annotated[
        str, typer.Argument(help="OCI layout folder, OCI or docker archive, root filesystem tar, or - ")
    ],
    name: Annotated[str, typer.Option("--name", help="Name for tasks to use, like team/base:latest.")],
    env: Annotated[list[str] | None, typer.Option(help="For a plain tar: NAME=VALUE.")] = None,
    workdir: Annotated[str | None, typer.Option(help="For a plain tar: working directory.")] = None,
    user: Annotated[str | None, typer.Option(help="For a plain tar: user.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a local image into the cache and make its disk."""
    from dayfly.images import ImageStore

    store = ImageStore()
    overrides: dict[str, Any] = {}
    if env:
        overrides["env"] = dict(e.partition("=")[::2] for e in env)
    if workdir:
        overrides["workdir"] = workdir
    if user:
        overrides["user"] = user
    image = store.import_image(sys.stdin.buffer if source == "-" else Path(source), name, **overrides)
    disk = store.disk(image)
    if as_json:
        put_json({"schema_version": 1, "name": image.name, "digest": image.digest, "disk": disk.digest})
    else:
        print(f"{image.name}  {image.digest}")


@image_app.command("list")
def image_list(as_json: Json = False) -> None:
    """List images with their size and last use."""
    from dayfly.images import ImageStore

    rows = ImageStore().list()
    if as_json:
        put_json({"schema_version": 1, "images": [r.as_dict() for r in rows]})
        return
    table = Table("image", "digest", "disk", "layers", "last use")
    for row in rows:
        table.add_row(row.name, row.digest[:19], _mib(row.disk_bytes), _mib(row.blob_bytes), _ago(row.last_used))
    Console().print(table)


@image_app.command("prune")
def image_prune(
    names: Annotated[list[str] | None, typer.Argument(help="Only these images.")] = None,
    unused_days: Annotated[float, typer.Option(help="Not used for so many days.")] = 30.0,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not in use.")] = False,
) -> None:
    """Remove images that were not used for long; never one in use."""
    from dayfly.images import ImageStore

    removed = ImageStore().prune(names=names or None, unused_s=0.0 if everything else unused_days * 86400)
    for name in removed:
        print(name)
    say(f"{len(removed)} image(s) removed")


@template_app.command("list")
def template_list(as_json: Json = False) -> None:
    """List templates with size and last use."""
    from dayfly.hypervisors.qemu import list_templates

    rows = list_templates()
    if as_json:
        put_json({"schema_version": 1, "templates": [vars(r) for r in rows]})
        return
    table = Table("template", "machine", "accelerator", "size", "last use")
    for row in rows:
        table.add_row(row.key[:19], row.machine, row.accelerator, _mib(row.bytes), _ago(row.last_used))
    Console().print(table)


@template_app.command("prune")
def template_prune(
    unused_days: Annotated[float, typer.Option(help="Not used for so many days.")] = 7.0,
    everything: Annotated[bool, typer.Option("--all", help="Every one that is not in use.")] = False,
) -> None:
    """Remove templates; they are made anew when needed. Never one in use."""
    from dayfly.hypervisors.qemu import prune_templates

    removed = prune_templates(unused_s=0.0 if everything else unused_days * 86400)
    for key in removed:
        print(key)
    say(f"{len(removed)} template(s) removed")


def gc(
    reindex: Annotated[bool, typer.Option("--reindex", help="Rebuild the index from the job folders.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    as_json: Json = False,
) -> None:
    """Remove what killed processes left: VMs, overlays, half-made rollouts. Safe beside running jobs."""
    from dayfly.hypervisors.qemu import sweep

    swept = sweep()
    if jobs_dir.is_dir():
        remove_half_made(jobs_dir)
    recovered: dict[str, Any] = {}
    for path in sorted(jobs_dir.glob("*/job.json")):
        folder = JobFolder.open(jobs_dir, path.parent.name)
        if folder.holder() is None:
            with folder.lock():
                found = folder.recover()
            if found.published or found.interrupted:
                recovered[folder.job_id] = {
                    "published": [r.rollout_id for r in found.published],
                    "interrupted": list(found.interrupted),
                }
    indexed = None
    if reindex:
        from dayfly.stores import SqlStore

        found_rows = SqlStore.reindex(jobs_dir)
        indexed = found_rows.rollouts
        for place, why in found_rows.broken:
            say(f"not indexed: {place}: {why}")
    if as_json:
        put_json({"schema_version": 1, "vms": list(swept), "jobs": recovered, "indexed": indexed})
        return
    print(f"{len(swept)} VM(s) of dead processes removed")
    for job, things in recovered.items():
        print(f"{job}: {json.dumps(things)}")
    if indexed is not None:
        print(f"{indexed} rollouts indexed")
