"""`image build` and `image builder`: images from Dockerfiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.cli.admin import image_app
from dayfly.cli.common import Json
from dayfly.cli.interrupts import run_interruptible
from dayfly.cli.output import put, put_json, say
from dayfly.errors import ConfigError, DayflyError

Words = list[str] | None


def register(app: typer.Typer) -> None:
    """The commands join `image` when this module is imported by the command line."""
    image_app.command("build")(image_build)
    image_app.command("builder")(image_builder)


def image_build(
    sources: Annotated[list[Path], typer.Argument(help="Task folders, or folders with a Dockerfile.")],
    name: Annotated[str, typer.Option("--name", help="Also keep the image under this name.")] = "",
    file: Annotated[Path | None, typer.Option("--file", help="The Dockerfile; default: SOURCE/Dockerfile.")] = None,
    build_arg: Annotated[Words, typer.Option("--build-arg", help="NAME=VALUE for an ARG.")] = None,
    secret: Annotated[Words, typer.Option("--secret", help="id=NAME,src=FILE for RUN --mount=type=secret.")] = None,
    target: Annotated[str, typer.Option("--target", help="Build up to this stage.")] = "",
    builder: Annotated[
        str, typer.Option("--builder", help="vm, or host: runs the Dockerfile's programs on this machine.")
    ] = "",
    builder_image: Annotated[str, typer.Option("--builder-image", help="Image of the builder VM.")] = "",
    network: Annotated[str, typer.Option("--network", help="proxied or none.")] = "",
    allow: Annotated[
        Words, typer.Option("--allow", help="Private place that RUN may reach: HOST[:PORT] or ADDRESS[/BITS].")
    ] = None,
    env: Annotated[Words, typer.Option("--env", help="NAME=VALUE for RUN, in no layer.")] = None,
    add_file: Annotated[
        Words, typer.Option("--add-file", help="NAME=FILE: RUN reads /dev/dayfly/NAME; in no layer.")
    ] = None,
    settings: Annotated[Path | None, typer.Option("--settings", help="Build settings; see docs/builds.md.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds a build may take.")] = 0.0,
    pull: Annotated[
        str,
        typer.Option("--pull", help="Base images: missing (asks registries for what is not here), always, never."),
    ] = "missing",
    renew: Annotated[bool, typer.Option("--renew", help="Build although the same was built before.")] = False,
    layers: Annotated[
        bool | None,
        typer.Option(
            "--layers/--no-layers",
            help="Keep what each instruction made, for the next build of this file; default: with one source.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Keep the build log to the file.")] = False,
    json: Json = False,
) -> None:
    """Build Dockerfiles, each in a builder VM; the log goes to standard error. Exit 4 when one fails."""
    from dayfly.images.builder import BuildSettings, load_settings

    if pull not in ("missing", "always", "never"):
        raise ConfigError(f"--pull {pull!r} is not known", hint="missing, always or never")
    if len(sources) > 1 and (name or file or target):
        raise ConfigError("--name, --file and --target are for one source", hint="call it once for each")
    changes: dict[str, Any] = {
        "builder": builder or None,
        "image": builder_image or None,
        "network": network or None,
        "allow": allow or None,
        "env": _table(env, "--env") or None,
        "files": {k: Path(v) for k, v in _table(add_file, "--add-file").items()} or None,
        "args": _table(build_arg, "--build-arg") or None,
    }
    wanted: BuildSettings = load_settings(settings).with_changes(
        {key: value for key, value in changes.items() if value is not None}
    )
    secrets = dict(_secret(text) for text in secret or [])
    keep = len(sources) == 1 if layers is None else layers
    jobs = [_request(source, file, secrets, target, timeout, keep) for source in sources]
    rows, failed = run_interruptible(lambda: _build_all(jobs, wanted, name, pull, renew=renew, quiet=quiet or json))
    if json:
        put_json({"schema_version": 1, "images": rows})
    else:
        for row in rows:
            put(f"{row['image']}  {row['digest']}" if "digest" in row else f"{row['dockerfile']}  failed")
    if failed:
        raise typer.Exit(4)


def image_builder(
    renew: Annotated[bool, typer.Option("--renew", help="Make it anew, of the newest packages.")] = False,
) -> None:
    """Make the image of builder VMs from Debian packages; `image build` does so at first use."""
    from dayfly.images import ImageStore
    from dayfly.images.builder.builder_image import ensure_builder, make_builder

    store = ImageStore()
    image = make_builder(store, say=say) if renew else ensure_builder(store, say=say)
    put(f"{image.name}  {image.digest}")


def _request(
    source: Path, file: Path | None, secrets: Mapping[str, Path], target: str, timeout: float, layers: bool
) -> Any:
    """A folder with a Dockerfile, or a task whose environment is one."""
    from dayfly.images.builder import BuildRequest
    from dayfly.tasks import load_task

    limit = 600.0
    folder = source
    if (source / "task.toml").is_file():
        task = load_task(source, strict=False)
        limit = task.build_timeout_s
        folder = source / "environment"
    dockerfile = file or folder / "Dockerfile"
    if not dockerfile.is_file():
        raise ConfigError(f"{dockerfile} does not exist", hint="give a folder with a Dockerfile, or a task folder")
    return BuildRequest(
        dockerfile,
        folder,
        secrets=secrets,
        target=target or None,
        timeout_s=timeout or limit,
        layers=layers,
    )


async def _build_all(
    requests: list[Any], settings: Any, name: str, pull: Any, *, renew: bool, quiet: bool
) -> tuple[list[dict[str, Any]], bool]:
    """One after the other; a failed one does not keep the others from being built."""
    from dayfly.images import ImageStore, Registries
    from dayfly.images.builder import ImageBuilder
    from dayfly.registry import HypervisorSettings, make_hypervisor

    store = ImageStore()
    hypervisor = functools.cache(lambda: make_hypervisor("qemu", HypervisorSettings()))
    resolve = functools.partial(store.pull, registries=Registries(), policy=pull)
    made = ImageBuilder(store, hypervisor, settings, resolve, on_output=_drop if quiet else _show)
    rows: list[dict[str, Any]] = []
    failed = False
    for request in requests:
        row: dict[str, Any] = {"dockerfile": str(request.dockerfile)}
        rows.append(row)
        try:
            built = await made.build(request, renew=renew, name=name)
        except DayflyError as error:
            if len(requests) == 1:
                raise
            failed = True
            row["error"] = error.message
            say(f"error: {error.message}")
            continue
        row |= {
            "image": name or built.image.name,
            "digest": built.image.digest,
            "cached": built.cached,
            "seconds": round(built.seconds, 3),
            "log": str(built.log),
        }
        say(f"{request.dockerfile}: {'built before' if built.cached else f'built in {built.seconds:.0f} s'}")
    return rows, failed


def _show(chunk: bytes) -> None:
    for line in chunk.decode("utf-8", "replace").splitlines():
        say(line)


def _drop(chunk: bytes) -> None:
    pass


def _table(words: Words, option: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in words or []]
    for key, equals, value in pairs:
        if not key or not equals:
            raise ConfigError(f"{option} {key + equals + value!r} is not NAME=VALUE", hint="write NAME=VALUE")
    return {key: value for key, _, value in pairs}


def _secret(text: str) -> tuple[str, Path]:
    """`id=NAME,src=FILE`, as for docker build."""
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    source = fields.get("src") or fields.get("source")
    if set(fields) - {"id", "src", "source", "type"} or not fields.get("id") or not source:
        raise ConfigError(f"--secret {text!r} is not id=NAME,src=FILE", hint="the file's content is the secret")
    if "," in source or not fields["id"].replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"--secret {text!r}: an id is made of letters, digits, - _ and .")
    return fields["id"], Path(source).expanduser()
