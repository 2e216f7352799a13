"""What judges a task, as one digest: with another one, an earlier verdict cannot be compared with a later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dayfly.evidence import canonical_json, sha256_bytes
from dayfly.model import Task
from dayfly.tasks.files import digest_of_files, select


def verifier_digest(task: Task) -> str:
    """sha256:… over the tests as they are carried, the verifier's command, image, user and environment as
    written (`${VAR}` stays a name), what is collected for it, and how rewards become a verdict.

    Limits and machine sizes are not in it: those are compared apart. Raises `TaskError` when a file cannot be
    read.
    """
    parts = {
        "pass_reward": task.pass_reward,
        "reward_range": task.reward_range,
        "strategy": task.reward_strategy if task.steps else None,
        "steps": [_judge(step) for step in task.all_steps],
    }
    return sha256_bytes(canonical_json(parts))


def _judge(step: Task) -> dict[str, Any]:
    files: dict[str, str] = {}
    for folder in (step.tests, step.tests_overlay):
        files |= select(folder, task=step.path, program="test.sh").files if folder is not None else {}
    return {
        "step": step.step,
        "files": digest_of_files(files),
        "command": step.verifier_command,
        "class": step.verifier_class.value,
        "image": step.verifier_image,
        "build": _context(step.verifier_dockerfile),
        "env": step.verifier_env,
        "vm_env": step.verifier_vm_env,
        "workdir": step.verifier_workdir,
        "user": step.verifier_user,
        "healthcheck": step.verifier_healthcheck.command if step.verifier_healthcheck else None,
        "collect": [[hook.command, hook.user] for hook in step.collect],
        "artifacts": [a.model_dump(mode="json") for a in step.artifacts],
        "min_reward": step.min_reward,
    }


def _context(dockerfile: Path | None) -> str | None:
    return digest_of_files(select(dockerfile.parent).files) if dockerfile is not None else None


MOST_METADATA_CHARS = 200


def plain_metadata(task: Task) -> dict[str, str]:
    """The texts, numbers and truth values of a task's metadata, as text; anything longer or nested is left out."""
    plain = {k: _text(v) for k, v in task.metadata.items() if isinstance(v, str | int | float)}
    return {k: v for k, v in plain.items() if len(v) <= MOST_METADATA_CHARS}


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
