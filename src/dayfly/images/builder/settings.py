"""What a person decides about builds, as one frozen value, and the file that holds it for all commands.

`$DAYFLY_BUILD_SETTINGS`, else `<XDG config>/dayfly/build.yaml`: what a host needs for its network (mirrors,
certificates) belongs there, once, and not into each command or job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from dayfly.errors import ConfigError
from dayfly.model import Frozen, Machine

BuilderKind = Literal["vm", "host"]
Network = Literal["proxied", "none"]


class BuildSettings(Frozen):
    builder: BuilderKind = "vm"
    """`host` runs a Dockerfile's programs on this machine: only for files you trust."""
    image: str | None = None
    """The builder VM's image; None: `dayfly/builder:1`, made at first use."""
    network: Network = "proxied"
    allow: tuple[str, ...] = ()
    """What RUN may reach though its address is private or this machine's: `host`, `host:port`, `10.0.0.0/8`."""
    env: dict[str, str] = {}
    """For RUN, and in no layer."""
    files: dict[str, Path] = {}
    """Name → file on the host: RUN reads it as `/dev/dayfly/NAME`; it is in no layer."""
    args: dict[str, str] = {}
    """Build arguments."""
    cpus: Annotated[int, Field(ge=1, le=64)] = 2
    memory_mb: Annotated[int, Field(ge=256)] = 2048
    storage_mb: Annotated[int, Field(ge=256)] = 16384

    @property
    def machine(self) -> Machine:
        return Machine(cpus=self.cpus, memory_mib=self.memory_mb, storage_mib=self.storage_mb)

    def with_changes(self, changes: Mapping[str, object]) -> BuildSettings:
        """A copy with the given fields; tables and lists are added to what is there."""
        merged: dict[str, object] = self.model_dump()
        for key, value in changes.items():
            old = merged[key]
            if isinstance(old, dict) and isinstance(value, dict):
                value = {**old, **value}
            elif isinstance(old, tuple) and isinstance(value, list | tuple):
                value = (*old, *value)
            merged[key] = value
        return _validated(merged, "the build options")


def default_settings_file() -> Path:
    named = os.environ.get("DAYFLY_BUILD_SETTINGS")
    if named:
        return Path(named).expanduser()
    root = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(root) / "dayfly" / "build.yaml"


def load_settings(path: Path | None = None) -> BuildSettings:
    """The settings in `path`, or in the default file if there is one. Raises `ConfigError`.

    Relative paths in `files` start at the settings file.
    """
    where = path or default_settings_file()
    if not where.exists():
        if path is not None or os.environ.get("DAYFLY_BUILD_SETTINGS"):
            raise ConfigError(f"the build settings {where} do not exist", hint="see docs/builds.md")
        return BuildSettings()
    try:
        data = yaml.safe_load(where.read_text(encoding="utf-8")) or {}
    except OSError as e:
        raise ConfigError(f"{where}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{where} is not YAML: {e}") from e
    settings = _validated(data, str(where))
    files = {name: where.parent / file.expanduser() for name, file in settings.files.items()}
    return settings.model_copy(update={"files": files})


def _validated(data: object, where: str) -> BuildSettings:
    try:
        settings = BuildSettings.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        near = get_close_matches(key, BuildSettings.model_fields, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(BuildSettings.model_fields)}"
        hint = known if first["type"] == "extra_forbidden" else "see docs/builds.md"
        raise ConfigError(f"{where}: {key}: {first['msg']}", hint=hint) from e
    for name in settings.files:
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"{where}: files: {name!r} is no plain file name", hint="RUN reads /dev/dayfly/NAME")
    return settings
