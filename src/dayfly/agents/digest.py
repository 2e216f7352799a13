"""What makes an agent version: its kind, its options, and the content of the files it brings."""

from __future__ import annotations

import importlib.util
import inspect
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dayfly.agents.command import CommandOptions
from dayfly.agents.function import FunctionOptions, find_function
from dayfly.agents.options import parse_options
from dayfly.agents.patch import PatchOptions
from dayfly.errors import ConfigError
from dayfly.evidence import canonical_json, sha256_bytes, sha256_file
from dayfly.model import AgentSpec
from dayfly.tasks import select


def agent_digest(spec: AgentSpec, base_dir: Path) -> str:
    """`sha256:…` of an agent version. Its name is not part of it, nor are host paths, only what lies there.

    Raises `ConfigError` when a file cannot be read or an option is not plain data.
    """
    parts: dict[str, Any] = {"kind": spec.kind}
    if spec.kind == "command":
        command = parse_options(CommandOptions, spec.options, "command")
        parts["options"] = command.model_dump(mode="json", exclude={"files"})
        parts["files"] = {
            guest: _content(base_dir / Path(host).expanduser()) for host, guest in command.files.items()
        }
    elif spec.kind == "patch":
        patch = parse_options(PatchOptions, spec.options, "patch")
        parts["files"] = _content(base_dir / Path(patch.folder).expanduser())
    elif spec.kind == "function":
        function = find_function(parse_options(FunctionOptions, spec.options, "function").function, base_dir)
        parts["function"] = getattr(function, "__qualname__", type(function).__qualname__)
        parts["source"] = _source_digest(function)
    else:
        parts["options"] = spec.options
        parts["source"] = _kind_source(spec.kind)
    try:
        return sha256_bytes(canonical_json(parts))
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"the options of agent {spec.name!r} are not plain data: {e}",
            hint="use texts, numbers, lists and tables",
        ) from e


def _content(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"the agent's file {path} does not exist", hint="paths are relative to the job file")
    chosen = select(path)
    modes = {name: meta.mode for name, meta in sorted(chosen.meta.items())}
    return sha256_bytes(canonical_json({"files": chosen.digest, "modes": modes}))


def _source_digest(thing: Any) -> str:
    """Digest of the source file that defines `thing`; empty when there is none (typed at a prompt)."""
    try:
        path = inspect.getsourcefile(thing) or inspect.getsourcefile(type(thing))
    except TypeError:
        path = inspect.getsourcefile(type(thing))
    return sha256_file(Path(path).resolve()) if path is not None and Path(path).is_file() else ""


def _kind_source(kind: str) -> str:
    """Digest of the module of a plug-in agent (dotted path or entry point); empty for built-in kinds."""
    dotted = kind
    if ":" not in kind:
        dotted = next((p.value for p in entry_points(group="dayfly.agents") if p.name == kind), "")
    module = dotted.partition(":")[0]
    if not module:
        return ""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    origin = Path(found.origin) if found is not None and found.origin else None
    return sha256_file(origin.resolve()) if origin is not None and origin.is_file() else ""
