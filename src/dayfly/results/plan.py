"""What a job planned for one agent version, from `job.json` and `lock.json`: it alone says what can count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayfly.errors import ConfigError, HostError, NotFoundError
from dayfly.evidence import JobFolder, find_job, find_path

CONTROLS = ("oracle", "no-op")
"""Kinds of agents that say something about tasks, not about themselves."""


@dataclass(frozen=True)
class Planned:
    """One agent of a job, as planned."""

    folder: JobFolder
    job_id: str
    """As the records have it; the folder may have been renamed."""
    job_name: str
    agent: str
    agent_digest: str
    agent_kind: str
    agent_options: Mapping[str, Any]
    attempts: int
    attempts_taken: int
    """The first so many are looked at."""
    tasks: Mapping[str, Mapping[str, Any]]
    """As in `lock.json`."""
    agent_digests: Mapping[str, str]
    """Of all agents of the job."""
    seed: int
    host: Mapping[str, str]
    early_stop: Mapping[str, Any] | None
    job_planned: int


def find_side(jobs_dir: Path, text: str) -> tuple[JobFolder, str | None]:
    """`JOB[:AGENT]` → the job and the agent's name, if one is given. Raises `NotFoundError`.

    Folders and agents may have a colon in their names, so every place where the text can be cut is tried.
    """
    whole = find_path(text)
    if whole is not None and not whole[1]:
        return whole[0], None
    cuts = [at for at, character in enumerate(text) if character == ":"] or [len(text)]
    first: NotFoundError | None = None
    for at in cuts:
        try:
            return find_job(jobs_dir, text[:at]), text[at + 1 :] or None
        except NotFoundError as error:
            first = first or error
    assert first is not None
    raise first


def read_plan(folder: JobFolder, agent: str | None, attempts: int | None = None) -> Planned:
    """Raises `ConfigError` when several agents are meant, `NotFoundError` for one that is not there, and
    `HostError` when the job's files are broken."""
    job, lock = folder.job(), folder.lock_data()
    try:
        name = choose_agent(folder.job_id, lock["agents"], agent)
        options = {a["name"]: a.get("options", {}) for a in job["job"]["agents"]}
        planned = job["job"]["attempts"]
        return Planned(
            folder=folder,
            job_id=job.get("id", folder.job_id),
            job_name=job["job"]["name"],
            agent=name,
            agent_digest=lock["agents"][name]["digest"],
            agent_kind=lock["agents"][name]["kind"],
            agent_options=options.get(name, {}),
            attempts=planned,
            attempts_taken=planned if attempts is None else min(planned, attempts),
            tasks=lock["tasks"],
            agent_digests={a: entry["digest"] for a, entry in lock["agents"].items()},
            seed=job["job"].get("seed", 0),
            host=lock.get("host", {}),
            early_stop=job.get("early_stop"),
            job_planned=lock["planned"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise HostError(
            f"{folder.path}: job.json or lock.json lacks {error}", hint="the job's files were changed or damaged"
        ) from error


def choose_agent(job_id: str, agents: Mapping[str, Mapping[str, Any]], wanted: str | None) -> str:
    """The agent that is meant: the one named, else the only one, or the only one beside oracle and no-op."""
    listed = ", ".join(agents) or "none"
    if wanted is not None:
        if wanted not in agents:
            raise NotFoundError(f"job {job_id} has no agent {wanted!r}", hint=f"its agents: {listed}")
        return wanted
    judged = list(agents) if len(agents) == 1 else [n for n, a in agents.items() if a["kind"] not in CONTROLS]
    if len(judged) != 1:
        raise ConfigError(f"job {job_id} has several agents: {listed}", hint=f"name one of them, as {job_id}:AGENT")
    return judged[0]
