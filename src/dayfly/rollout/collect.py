"""What is kept of the agent's work: what it changed, its logs, the declared artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayfly.errors import GuestRefused, InfraError, Tampered
from dayfly.evidence import canonical_json
from dayfly.model import Change, EntryMeta, Outcome, Task
from dayfly.protocols import TransferLimits, Vm
from dayfly.rollout.prepare import workdir_of
from dayfly.rollout.progress import Progress


@dataclass(frozen=True)
class Carried:
    """What crosses into a separate verifier: for each declared artifact its copy on the host, or its absence."""

    source: str
    copy: Path | None
    meta: Mapping[str, EntryMeta] = field(default_factory=dict)


async def collect(p: Progress, vm: Vm, task: Task, start: tuple[Change, ...]) -> list[Carried]:
    """Run collect hooks, then keep what the agent changed, its logs and the declared artifacts."""
    if task.collect:
        await vm.thaw()
        await _collect_hooks(p, vm, task)
        await vm.freeze()
    changed = _difference(start, await vm.changes())
    p.record.write("changes.json", canonical_json([c.model_dump() for c in changed]))
    planted = [c.path for c in changed if is_verdict_place(c) and c.kind != "deleted"]
    if planted:  # noted first: what breaks below must not turn it into a fault of ours
        error = Tampered(
            f"the agent made {planted[0]} where the verdict belongs",
            hint=f"{len(planted)} path(s) there: {', '.join(planted[:5])}",
            cause="planted_verdict",
        )
        p.fail(Outcome.TAMPERED, error)
    limits = TransferLimits(bytes=p.options.max_artifact_bytes)
    await _fetch(p, vm, "/logs/agent", p.record.folder / "agent" / "logs", limits)
    manifest: list[dict[str, Any]] = []
    carried: list[Carried] = []
    for source, destination, exclude in _artifacts(p, task):
        copy = p.record.folder / "artifacts" / destination.lstrip("/")
        got = await _fetch(p, vm, source, copy, limits, exclude)
        carried.append(Carried(source, copy if got else None, got[1] if got else {}))
        manifest.append({"source": source, "destination": destination, "status": "ok" if got else "missing"})
    p.record.write("artifacts/manifest.json", json.dumps(manifest, indent=2).encode())
    return carried


async def _collect_hooks(p: Progress, vm: Vm, task: Task) -> None:
    """Best effort, as in Harbor: a hook that fails is noted."""
    for number, hook in enumerate(task.collect, 1):
        try:
            result = await vm.exec(["/bin/sh", "-c", hook.command], user=hook.user, timeout_s=hook.timeout_s)
        except GuestRefused as error:
            p.record.note(f"collect hook {number} could not be run: {error.message}")
            continue
        p.record.write(f"collect-{number}.txt", result.stdout.data + result.stderr.data)
        if not result.ok:
            p.record.note(f"collect hook {number} ended with status {result.exit_code}")


def _artifacts(p: Progress, task: Task) -> list[tuple[str, str, Callable[[str], bool] | None]]:
    """Declared artifacts and Harbor's convention folder, with where they go and what is left out."""
    listed: list[tuple[str, str, Callable[[str], bool] | None]] = [("/logs/artifacts", "logs/artifacts", None)]
    for artifact in task.artifacts:
        source = artifact.source if artifact.source.startswith("/") else f"{workdir_of(p, task)}/{artifact.source}"
        patterns = artifact.exclude
        exclude = _excluder(patterns) if patterns else None
        listed.append((source, artifact.destination or source, exclude))
    return listed


def _excluder(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    import pathspec  # slow to import, and few tasks exclude anything

    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file


async def _fetch(
    p: Progress,
    vm: Vm,
    source: str,
    dest: Path,
    limits: TransferLimits,
    exclude: Callable[[str], bool] | None = None,
) -> tuple[int, Mapping[str, EntryMeta]] | None:
    """Copy out of the guest; None when the source is not there. A transfer that breaks is an error."""
    dest.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        moved = await vm.get(source, dest, exclude=exclude, limits=limits)
    except GuestRefused as error:
        if error.cause == "not_found":
            return None
        raise InfraError(
            f"{source} could not be collected: {error.message}", hint=error.hint, cause="collect_failed"
        ) from error
    if moved.skipped:
        p.record.note(f"{source}: {len(moved.skipped)} path(s) not carried: {', '.join(moved.skipped[:5])}")
    return moved.files, moved.entries


def _difference(before: tuple[Change, ...], after: tuple[Change, ...]) -> list[Change]:
    """Entries of `after` that are new or different, and those that went away."""
    old = {c.path: c for c in before}
    new = {c.path for c in after}
    gone = [c.model_copy(update={"kind": "deleted", "digest": ""}) for c in before if c.path not in new]
    return sorted([c for c in after if old.get(c.path) != c] + gone, key=lambda c: c.path)


def is_verdict_place(change: Change) -> bool:
    """True for anything at or below /logs/verifier, and for /logs itself turned into something else."""
    place = change.path == "/logs/verifier" or change.path.startswith("/logs/verifier/")
    return place or (change.path == "/logs" and change.kind != "dir")
