"""Baselines: results that somebody chose to compare with, under a name. They move on purpose only.

`<jobs-dir>/baselines/` holds of each name

    <name>.baseline.json   what it is now; replaced whole or not at all
    <name>.history.jsonl   every move, oldest first; only ever appended to
"""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from dayfly.errors import ConfigError, DayflyError, HostError, NotFoundError
from dayfly.evidence import append_event, read_events, read_json, readable_json, write_durable
from dayfly.evidence.durable import PRIVATE_FILE, end_torn_line, host_errors, make_folders
from dayfly.model import Frozen
from dayfly.results.load import load_job_side, load_side
from dayfly.results.plan import find_side
from dayfly.results.side import Side

FOLDER = "baselines"
DEFAULT_NAME = "main"
LOCK_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Baseline(Frozen):
    """What a name stands for."""

    name: str
    job_id: str
    agent: str
    agent_digest: str
    results_digest: str
    """`Side.digest` when it was set."""
    tasks: int
    rollouts: int
    """All of them graded."""
    set_by: str
    """user@host."""
    set_unix: float
    reason: str
    previous: str | None = None
    """JOB:AGENT before, or None for the first."""
    previous_digest: str | None = None
    """Its results digest."""

    @property
    def label(self) -> str:
        return f"{self.job_id}:{self.agent}"


def set_baseline(
    jobs_dir: Path, text: str, *, reason: str, name: str = DEFAULT_NAME, expect: str | None = None
) -> Baseline:
    """Let `name` stand for the results of `JOB[:AGENT]`, durably.

    `expect`: the job, `JOB:AGENT` or results digest that it stands for now (`none`: it is new), so that of two
    who move it at once the later one fails. Raises `ConfigError` when these results are not complete, no reason
    is given, or what is there is not what was expected.
    """
    current_file = _file(jobs_dir, name)
    if not reason.strip():
        raise ConfigError("a baseline is not moved without a reason", hint="give one, with --reason")
    if text.startswith("@"):
        raise ConfigError(f"{text} is a baseline, not a job", hint="name the job, as JOB or JOB:AGENT")
    side = load_side(jobs_dir, text)
    if find_side(jobs_dir, text)[0].path.parent.resolve() != jobs_dir.resolve():
        raise ConfigError(
            f"{text} is not in {jobs_dir}, where its baseline would be kept",
            hint="name its folder of jobs with --jobs-dir",
        )
    _refuse_incomplete(jobs_dir, side)
    make_folders(current_file.parent)
    with _moving(current_file):
        now = _read(current_file)
        _refuse_unexpected(name, now, expect)
        made = Baseline(
            name=name,
            job_id=side.job_id,
            agent=side.agent,
            agent_digest=side.agent_digest,
            results_digest=side.digest,
            tasks=len(side.tasks),
            rollouts=side.graded,
            set_by=_who(),
            set_unix=time.time(),
            reason=reason.strip(),
            previous=now.label if now else None,
            previous_digest=now.results_digest if now else None,
        )
        # History first: a move that was cut short is told of there, and did not happen.
        end_torn_line(_history_file(jobs_dir, name))
        append_event(_history_file(jobs_dir, name), made.model_dump(mode="json"), durable=True)
        write_durable(current_file, readable_json(made))
    return made


def get_baseline(jobs_dir: Path, name: str = DEFAULT_NAME) -> Baseline:
    """Raises `NotFoundError` naming those that there are, `HostError` for a broken file."""
    found = _read(_file(jobs_dir, name))
    if found is None:
        suffix = ".baseline.json"
        known = sorted(p.name.removesuffix(suffix) for p in (jobs_dir / FOLDER).glob(f"[!.]*{suffix}"))
        raise NotFoundError(
            f"there is no baseline {name!r} in {jobs_dir}",
            hint=f"there are: {', '.join(known)}" if known else "`dayfly baseline set JOB --reason TEXT` makes one",
        )
    return found


def history(jobs_dir: Path, name: str = DEFAULT_NAME) -> list[Baseline]:
    """Every move, oldest first. Raises `NotFoundError` when there is no such baseline.

    The last of all may be one that a crash cut short; it is left out, as it did not happen.
    """
    current = get_baseline(jobs_dir, name)
    moves = []
    for line in read_events(_history_file(jobs_dir, name)):
        try:
            moves.append(Baseline.model_validate(line))
        except ValidationError:
            continue
    return _that_happened(moves, current)


def load_baseline(jobs_dir: Path, name: str, *, attempts: int | None = None) -> Side:
    """The results that a baseline stands for. Raises `ConfigError` when they are no longer what was set."""
    baseline = get_baseline(jobs_dir, name or DEFAULT_NAME)
    folder, _ = find_side(jobs_dir, baseline.job_id)
    side = load_job_side(folder, baseline.agent)
    if side.digest != baseline.results_digest:
        raise ConfigError(
            f"baseline {baseline.name} was set to results {baseline.results_digest[:19]}…, "
            f"job {baseline.job_id} now holds {side.digest[:19]}…",
            hint="`dayfly show --verify` says what changed; `dayfly baseline set` moves the baseline on purpose",
        )
    return side if attempts is None else load_job_side(folder, baseline.agent, attempts=attempts)


# --- rules ---------------------------------------------------------------------------------------


def _refuse_incomplete(jobs_dir: Path, side: Side) -> None:
    if side.problems:
        raise ConfigError(
            f"{side.label} cannot be a baseline: {side.problems[0]}"
            + (f" (and {len(side.problems) - 1} more)" if len(side.problems) > 1 else ""),
            hint=f"`dayfly show --verify {side.job_id}` lists what differs",
        )
    if side.graded == side.planned and side.planned:
        return
    without = [t.task for t in side.tasks.values() if t.graded < t.planned]
    listed = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
    where = "" if jobs_dir == Path("jobs") else f" --jobs-dir {jobs_dir}"
    raise ConfigError(
        f"{side.label} cannot be a baseline: {side.graded} of {side.planned} planned rollouts are graded; "
        f"missing in {listed or 'every task'}",
        hint=f"finish the job: `dayfly run --resume {side.job_id}{where}`",
    )


def _refuse_unexpected(name: str, now: Baseline | None, expect: str | None) -> None:
    if expect is None:
        return
    names = {now.job_id, now.label, now.results_digest} if now else {"none"}
    if expect not in names:
        there = f"stands for {now.label} ({now.results_digest[:19]}…)" if now else "does not exist yet"
        raise ConfigError(
            f"baseline {name} {there}, not for {expect}: it was not moved",
            hint="somebody moved it; look at `dayfly baseline show` and decide anew",
            cause="moved",
        )


def _that_happened(moves: list[Baseline], current: Baseline) -> list[Baseline]:
    """Without moves that a crash cut short: the next one that is there was not made on top of them.

    A move whose successor is lost is kept; what stands now is there in any case.
    """
    kept = [current]
    for move in reversed([m for m in moves if m != current]):
        after = kept[-1]
        cut_short = move.set_unix > current.set_unix or (
            (after.previous_digest, after.previous) != (move.results_digest, move.label)
            and (after.previous_digest, after.previous) in {(m.results_digest, m.label) for m in moves}
        )
        if not cut_short:
            kept.append(move)
    return kept[::-1]


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


# --- files ---------------------------------------------------------------------------------------


def _file(jobs_dir: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a baseline", hint="use letters, digits, `.`, `_` and `-`, at most 64"
        )
    return jobs_dir / FOLDER / f"{name}.baseline.json"


def _history_file(jobs_dir: Path, name: str) -> Path:
    return jobs_dir / FOLDER / f"{name}.history.jsonl"


def _read(path: Path) -> Baseline | None:
    try:
        return Baseline.model_validate(read_json(path))
    except NotFoundError:
        return None
    except ValidationError as error:
        raise HostError(f"{path} is not a baseline: {error.errors()[0]['msg']}", cause="broken_file") from error


@contextmanager
def _moving(path: Path) -> Iterator[None]:
    """Be the only one who moves this baseline. The kernel lets go when the process ends."""
    lock = path.with_name(f".{path.name}.lock")
    with host_errors(f"locking {lock}"):
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DayflyError(
                        f"another process has been moving baseline {path} for {LOCK_TIMEOUT_S:g} s",
                        hint="look for a dayfly that hangs",
                        cause="locked",
                    ) from error
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
