"""Short names → implementations. A dotted path (`package.module:Name`) or an entry point works, too.

Entry point groups: `dayfly.agents` (class with `from_options(options, base_dir)`) and `dayfly.hypervisors`
(callable taking `HypervisorSettings`). Nothing is imported before it is asked for.

Modules are found where Python finds them: installed, or on PYTHONPATH. The job file's folder is not added, so
that a file lying there cannot take the place of a module of the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from dayfly.errors import ConfigError
from dayfly.model import AgentSpec, Task
from dayfly.protocols import Agent, Hypervisor, Verifier

AGENTS = {
    "oracle": "dayfly.agents:OracleAgent",
    "no-op": "dayfly.agents:NoOpAgent",
    "command": "dayfly.agents:CommandAgent",
    "function": "dayfly.agents:FunctionAgent",
    "patch": "dayfly.agents:PatchAgent",
}


@dataclass(frozen=True)
class HypervisorSettings:
    """What the command line says about VMs, whatever the hypervisor."""

    accelerator: str = "auto"
    """auto, kvm or tcg."""
    fork: bool = True
    max_starting: int = 4
    """How many VMs may be starting at the same time."""
    kernel: Path | None = None
    cache_dir: Path | None = None


def _load(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    if module.endswith(".py") or "/" in module:
        raise ConfigError(
            f"{what} {path!r} names a file",
            hint="write package.module:Name; an async function in a file is `kind: function`, "
            "`options: {function: path/to/file.py:name}`",
        )
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"{what} {path!r} cannot be loaded", hint="write it as package.module:Name")
    return _imported(lambda: getattr(importlib.import_module(module), name), path, what)


def _imported(load: Callable[[], Any], path: str, what: str) -> Any:
    """What `load` imports. A module that fails while it is imported is the writer's affair: `ConfigError`."""
    try:
        return load()
    except ImportError as e:
        raise ConfigError(
            f"{what} {path!r} cannot be loaded: {e}", hint="install the package, or set PYTHONPATH to its folder"
        ) from e
    except AttributeError as e:
        raise ConfigError(f"{what} {path!r} cannot be loaded: {e}", hint="check the name after the colon") from e
    except (Exception, SystemExit) as e:
        raise ConfigError(
            f"{what} {path!r} cannot be loaded: {type(e).__name__}: {e}", hint="mend the module"
        ) from e


def _find(name: str, known: dict[str, str], group: str, what: str) -> Any:
    if name in known:
        return _load(known[name], what)
    for point in entry_points(group=group):
        if point.name == name:
            return _imported(point.load, point.value, what)
    if ":" in name:
        return _load(name, what)
    near = get_close_matches(name, known, n=1)
    raise ConfigError(
        f"there is no {what} called {name!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}",
    )


def make_agent(spec: AgentSpec, base_dir: Path) -> Agent:
    """The agent that a spec names. Raises `ConfigError` for an unknown name or option."""
    found = _find(spec.kind, AGENTS, "dayfly.agents", "agent")
    if not hasattr(found, "from_options"):
        raise ConfigError(
            f"agent {spec.kind!r} has no from_options(options, base_dir)",
            hint="see dayfly.protocols.Agent; an async function is `kind: function`",
        )
    return cast("Agent", found.from_options(spec.options, base_dir))


def make_verifier(task: Task) -> Verifier:
    """The judge that a task asks for: its command, else tests/test.sh by Harbor's contract."""
    from dayfly.verifiers import CommandVerifier, ScriptVerifier

    return CommandVerifier() if task.verifier_command is not None else ScriptVerifier()


def make_hypervisor(name: str, settings: HypervisorSettings) -> Hypervisor:
    """`qemu`, `fake`, an entry point or a dotted path."""
    known: dict[str, Callable[[HypervisorSettings], Hypervisor]] = {"qemu": _qemu, "fake": _fake}
    if name in known:
        return known[name](settings)
    paths = {n: n for n in known}
    return cast("Hypervisor", _find(name, paths, "dayfly.hypervisors", "hypervisor")(settings))


def _qemu(settings: HypervisorSettings) -> Hypervisor:
    from dayfly.hypervisors.qemu import QemuHypervisor, QemuSettings

    return QemuHypervisor(
        QemuSettings(
            accelerator=settings.accelerator,
            fork=settings.fork,
            max_starting=settings.max_starting,
            kernel=settings.kernel,
            cache_dir=settings.cache_dir,
        )
    )


def _fake(settings: HypervisorSettings) -> Hypervisor:
    from dayfly.testing import FakeHypervisor

    return FakeHypervisor()
