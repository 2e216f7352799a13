"""`doctor`, `image`, `template` and `gc`: the state of this host."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.cli.common import DEFAULT_JOBS_DIR, JobsDir, Json
from dayfly.cli.output import Cell, put, put_json, put_table, say
from dayfly.errors import ConfigError, DayflyError
from dayfly.evidence import JobFolder, list_jobs, remove_half_made

image_app = typer.Typer(help="Images on this host.", no_args_is_help=True)
template_app = typer.Typer(help="Saved states that VMs are forked from.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(gc)
    app.add_typer(image_app, name="image")
    app.add_typer(template_app, name="template")


def doctor(
    fetch_kernel: Annotated[
        bool, typer.Option("--fetch-kernel", help="First get a guest kernel into the cache, if there is none.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this host; each line is ok, warn or fail, with what to do. Exit 4 when something fails."""
    from dayfly.doctor import checks

    if fetch_kernel:
        _ensure_kernel()
    found = checks()
    if json:
        put_json({"schema_version": 1, "checks": [vars(c) for c in found]})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        rows: list[tuple[Cell, Cell, Cell]] = []
        for check in found:
            rows.append(((check.status, colours[check.status]), check.name, check.detail))
            if check.fix and check.status != "ok":
                rows.append(("", "", f"→ {check.fix}"))
        put_table(("", "check", "finding"), rows, wrap="finding")
    if any(c.status == "fail" for c in found):
        raise typer.Exit(4)


def _ensure_kernel() -> None:
    from dayfly.errors import HostError
    from dayfly.hypervisors.qemu import QemuSettings, kernel

    settings = QemuSettings()
    try:
        kernel.find_kernel(settings.kernel, settings.cache)
    except HostError:
        say(f"fetching a guest kernel into {settings.cache / 'kernels'}")
        kernel.fetch_kernel(settings.cache)


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


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--env {text!r} is not NAME=VALUE", hint="write an empty value as NAME=")
    return name, value


@image_app.command("import")
def image_import(
    source: Annotated[
        str, typer.Argument(help="OCI layout folder, OCI or docker archive, root filesystem tar, or - ")
    ],
    name: Annotated[str, typer.Option("--name", help="Name for tasks to use, like team/base:latest.")],
    env: Annotated[list[str] | None, typer.Option(help="For a plain tar: NAME=VALUE.")] = None,
    workdir: Annotated[str | None, typer.Option(help="For a plain tar: working directory.")] = None,
    user: Annotated[str | None, typer.Option(help="For a plain tar: user.")] = None,
    json: Json = False,
) -> None:
    """Bring a local image into the cache and make its disk."""
    from dayfly.images import ImageStore

    store = ImageStore()
    overrides: dict[str, Any] = {}
    if env:
        overrides["env"] = dict(_variable(e) for e in env)
    if workdir:
        overrides["workdir"] = workdir
    if user:
        overrides["user"] = user
    image = store.import_image(sys.stdin.buffer if source == "-" else Path(source), name, **overrides)
    disk = store.disk(image)
    if json:
        put_json({"schema_version": 1, "name": image.name, "digest": image.digest, "disk": disk.digest})
    else:
        put(f"{image.name}  {image.digest}")


@image_app.command("list")
def image_list(json: Json = False) -> None:
    """List images with their size and last use."""
    from dayfly.images import ImageStore

    rows = ImageStore().list()
    if json:
        put_json({"schema_version": 1, "images": [r.as_dict() for r in rows]})
        return
    if not rows:
        say("no images; `dayfly image pull` or `dayfly image import` brings one here")
        return
    put_table(
        ("image", "digest", "disk", "layers", "last use"),
        ((r.name, r.digest[:19], _mib(r.disk_bytes), _mib(r.blob_bytes), _ago(r.last_used)) for r in rows),
        wrap="image",
    )


@image_app.command("prune")
def image_prune(
    names: Annotated[list[str] | None, typer.Argument(help="Only these images.")] = None,
    unused_days: Annotated[float, typer.Option(help="Not used for so many days.")] = 30.0,
    all: Annotated[bool, typer.Option("--all", help="Everything that is not in use.")] = False,
) -> None:
    """Remove images that were not used for long; never one in use."""
    from dayfly.images import ImageStore

    removed = ImageStore().prune(names=names or None, unused_s=0.0 if all else unused_days * 86400)
    for name in removed:
        put(name)
    say(f"{len(removed)} image(s) removed")


@template_app.command("list")
def template_list(json: Json = False) -> None:
    """List templates with size and last use."""
    from dayfly.hypervisors.qemu import list_templates

    rows = list_templates()
    if json:
        put_json({"schema_version": 1, "templates": [vars(r) for r in rows]})
        return
    if not rows:
        say("no templates; the first rollout of each machine size makes one")
        return
    put_table(
        ("template", "machine", "accelerator", "size", "last use"),
        ((r.key[:19], r.machine, r.accelerator, _mib(r.bytes), _ago(r.last_used)) for r in rows),
    )


@template_app.command("prune")
def template_prune(
    unused_days: Annotated[float, typer.Option(help="Not used for so many days.")] = 7.0,
    all: Annotated[bool, typer.Option("--all", help="Every one that is not in use.")] = False,
) -> None:
    """Remove templates; they are made anew when needed. Never one in use."""
    from dayfly.hypervisors.qemu import prune_templates

    removed = prune_templates(unused_s=0.0 if all else unused_days * 86400)
    for key in removed:
        put(key)
    say(f"{len(removed)} template(s) removed")


def gc(
    reindex: Annotated[bool, typer.Option("--reindex", help="Rebuild the index from the job folders.")] = False,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Remove what killed processes left: VMs, overlays, half-made rollouts. Safe beside running jobs."""
    from dayfly.hypervisors.qemu import sweep

    swept = sweep()
    half_made = remove_half_made(jobs_dir)
    recovered: dict[str, dict[str, list[str]]] = {}
    for job_id in list_jobs(jobs_dir):
        try:
            found = _recover(JobFolder.open(jobs_dir, job_id))
        except DayflyError as error:  # one broken job keeps no other from being cleaned
            say(f"warning: {job_id}: {error.message}")
            continue
        if any(found.values()):
            recovered[job_id] = found
    indexed = None
    if reindex:
        from dayfly.stores import SqlStore

        rebuilt = SqlStore.reindex(jobs_dir)
        indexed = rebuilt.rollouts
        for place, why in rebuilt.broken:
            say(f"not indexed: {place}: {why}")
    if json:
        put_json(
            {
                "schema_version": 1,
                "vms": list(swept),
                "half_made": [str(p) for p in half_made],
                "jobs": recovered,
                "indexed": indexed,
            }
        )
        return
    put(f"{len(swept)} VM(s) of dead processes removed, {len(half_made)} half-made job(s) removed")
    for job_id, things in recovered.items():
        put(
            f"{job_id}: {len(things['published'])} finished rollout(s) put in place, "
            f"{len(things['interrupted'])} interrupted one(s) set aside"
        )
    if indexed is not None:
        put(f"{indexed} rollouts indexed")


def _recover(job: JobFolder) -> dict[str, list[str]]:
    """Bring a job forward that nobody works on; see `JobFolder.recover`."""
    if job.holder() is not None:
        return {}
    with job.lock():
        found = job.recover()
    return {"published": [r.rollout_id for r in found.published], "interrupted": list(found.interrupted)}
