"""The folder of a job, <jobs-dir>/<job-id>, holds:

    job.json, lock.json, events.jsonl
    rollouts/<task>/<agent>/<attempt>/            the attempt's result
    rollouts/<task>/<agent>/<attempt>.retry-<n>/  an earlier start of it, not graded
    rollouts/<task>/<agent>/<attempt>.changed-<n>/  from before task or agent changed
    work/<rollout-id>/                            in progress
    interrupted/<rollout-id>/                     what a killed controller left of one

Every state between two system calls is one that `recover` brings forward: a rollout counts once its sealed
folder is complete, wherever it lies.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayfly.errors import DayflyError, HostError, NotFoundError
from dayfly.evidence.digests import readable_json, sha256_bytes
from dayfly.evidence.durable import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    append_event,
    end_torn_line,
    host_errors,
    make_folders,
    move_folder,
    publish,
    read_events,
    read_json,
    remove_tree,
    write_durable,
    write_new,
)
from dayfly.evidence.rollout_folder import DISK_NAME, RECORD_NAME, RolloutFolder
from dayfly.evidence.seal import is_intact, load_record, load_sealed, seal
from dayfly.model import RolloutKey, RolloutRecord

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no letter is taken for a digit
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPT = re.compile(r"(\d+)(?:\.(retry|changed)-(\d+))?")
_LOCK_NAME = ".lock"
ALREADY_RECORDED = "already_recorded"

OnBroken = Callable[[Path, DayflyError], None]


def new_job_id() -> str:
    """`20261202-081500-k3f9q2`: sorts by UTC time of making, to the second."""
    return _new_id(6)


def new_rollout_id() -> str:
    """As a job's id, with a longer random part: a plan makes a hundred thousand within a second."""
    return _new_id(10)


def _new_id(length: int) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(length))}"


def safe_component(name: str) -> str:
    """A folder name for a task or agent: the name if it is plain, else readable text, `~`, a digest.

    Different names never get the same folder: `~` is not in plain names.
    """
    if _PLAIN.fullmatch(name):
        return name
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "x"
    digest = sha256_bytes(name.encode("utf-8", "surrogatepass")).removeprefix("sha256:")
    return f"{slug}~{digest[:10]}"


def list_jobs(jobs_dir: Path) -> list[str]:
    """Ids of the jobs in a folder, oldest first; a folder that is not there has none."""
    if not jobs_dir.is_dir():
        return []
    return sorted(p.parent.name for p in jobs_dir.glob("*/job.json") if not p.parent.name.startswith("."))


def remove_half_made(jobs_dir: Path, older_than_s: float = 60.0) -> list[Path]:
    """Delete what processes left that were killed while making a job; returns it. For `dayfly gc`.

    Younger than `older_than_s` it may still be in the making.
    """
    gone = []
    with host_errors(f"cleaning {jobs_dir}"):
        for path in sorted(jobs_dir.glob(".*.tmp")):
            if path.is_dir() and time.time() - path.stat().st_mtime >= older_than_s:
                remove_tree(path)
                gone.append(path)
    return gone


@dataclass(frozen=True)
class Recovered:
    """What `JobFolder.recover` found and did."""

    published: tuple[RolloutRecord, ...] = ()
    """Finished before the crash; their last rename was done now."""
    interrupted: tuple[str, ...] = ()
    """Rollout ids whose partial evidence now lies in `interrupted/`."""


class JobFolder:
    """One job's files. Reading needs nothing; whoever starts rollouts holds `lock()`."""

    def __init__(self, jobs_dir: Path, job_id: str) -> None:
        """Does no I/O; see `create` and `open`."""
        if not _JOB_ID.fullmatch(job_id):
            raise NotFoundError(f"{job_id!r} cannot be the id of a job", hint="`dayfly list` shows the ids")
        self.job_id = job_id
        self.path = jobs_dir / job_id
        self._publishing = threading.Lock()

    @classmethod
    def create(cls, jobs_dir: Path, job_id: str, job: dict[str, Any], lock: dict[str, Any]) -> JobFolder:
        """Make a job's folder with `job.json` and `lock.json`, whole or not at all. Raises `HostError`."""
        self = cls(jobs_dir, job_id)
        with host_errors(f"making {self.path}"):
            make_folders(jobs_dir)
            temporary = jobs_dir / f".{job_id}.{secrets.token_hex(4)}.tmp"
            temporary.mkdir(PRIVATE_FOLDER)
            try:
                write_new(temporary / "job.json", readable_json(job))
                write_new(temporary / "lock.json", readable_json(lock))
                for name in ("rollouts", "work"):
                    (temporary / name).mkdir(PRIVATE_FOLDER)
                publish(temporary, self.path)
            finally:
                remove_tree(temporary)
        return self

    @classmethod
    def open(cls, jobs_dir: Path, job_id: str) -> JobFolder:
        """A job that exists. Raises `NotFoundError`."""
        self = cls(jobs_dir, job_id)
        if not (self.path / "job.json").is_file():
            raise NotFoundError(
                f"there is no job {job_id} in {jobs_dir}",
                hint="`dayfly list` shows the jobs; --jobs-dir names another folder",
            )
        return self

    def job(self) -> dict[str, Any]:
        """`job.json`. Raises `HostError` naming the file when it is broken."""
        return _table(self.path / "job.json")

    def lock_data(self) -> dict[str, Any]:
        """`lock.json`. Raises `HostError` naming the file when it is broken."""
        return _table(self.path / "lock.json")

    def replace_plan(self, job: dict[str, Any], lock: dict[str, Any]) -> None:
        """Take over accepted changes. What was there before stays in the event log."""
        earlier = {"job": self.job(), "lock": self.lock_data()}
        append_event(
            self.path / "events.jsonl",
            {"time": time.time(), "event": "plan_replaced", **earlier},
            durable=True,
        )
        # The lock last: until it is new, a resume still sees the change and asks again.
        write_durable(self.path / "job.json", readable_json(job))
        write_durable(self.path / "lock.json", readable_json(lock))

    def add_images(self, images: dict[str, str]) -> None:
        """Note images, name → digest, in `lock.json`; one that is there already stays as it is."""
        lock = self.lock_data()
        known = lock.get("images") or {}
        if set(images) - set(known):
            write_durable(self.path / "lock.json", readable_json(lock | {"images": images | known}))

    def event(self, event: dict[str, Any]) -> None:
        """Append to `events.jsonl`."""
        append_event(self.path / "events.jsonl", event)

    def events(self) -> Iterator[dict[str, Any]]:
        return read_events(self.path / "events.jsonl")

    # --- one controller at a time ------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who works on this job. The kernel lets go when the process ends, however it ends.

        Raises `DayflyError` (cause `locked`) naming the process that holds it.
        """
        path = self.path / _LOCK_NAME
        with host_errors(f"locking {path}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise DayflyError(
                    f"job {self.job_id} is being worked on by process {holder}",
                    hint="wait for it, or stop it with Ctrl-C; `dayfly logs -f` follows it",
                    cause="locked",
                ) from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def holder(self) -> int | None:
        """The process that works on this job now, or None."""
        try:
            fd = os.open(self.path / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            return int(text) if text.isdigit() else 0
        finally:
            os.close(fd)
        return None

    # --- making a rollout --------------------------------------------------------------------------

    @contextmanager
    def rollout(self, rollout_id: str, *, max_bytes: int = 64 << 20) -> Iterator[RolloutFolder]:
        """The working folder of one rollout; on exit its scratch is gone.

        Evidence that was not published stays for `recover`. Raises `HostError`.
        """
        record = RolloutFolder(self._work / safe_component(rollout_id), max_bytes=max_bytes)
        try:
            yield record
        finally:
            with host_errors(f"removing {record.scratch}"):
                remove_tree(record.scratch)
            with suppress(OSError):  # not empty: the evidence is still there
                record.work.rmdir()

    def publish_rollout(self, record: RolloutRecord, work: RolloutFolder) -> RolloutRecord:
        """Seal a rollout's evidence and give it its final place, durably; returns the sealed record.

        An earlier start of the same attempt that was not graded is kept beside it as `<attempt>.retry-<n>`.
        A graded one is never replaced: raises `HostError` (cause `already_recorded`). Also raises `HostError`
        when the host fails; the evidence then stays in `work`.
        """
        record = record.model_copy(update={"notes": (*record.notes, *work.notes)})
        self._refuse_second(record.key)
        sealed = seal(record, work.folder)
        with self._publishing:
            self._place(sealed, work.folder)
        return sealed

    def _place(self, record: RolloutRecord, evidence: Path) -> None:
        """Move a sealed folder to its final name."""
        final = self.rollout_path(record.key)
        with host_errors(f"publishing {final}"):
            make_folders(final.parent)
            self._refuse_second(record.key)
            if os.path.lexists(final):
                self._set_aside(final, record.key)
            # A crash here leaves the attempt without a result, and a sealed folder that `recover` will move.
            move_folder(evidence, final)

    def _refuse_second(self, key: RolloutKey) -> None:
        try:
            there = load_record(self.rollout_path(key))
        except DayflyError:  # none, or a broken one: that is set aside
            return
        if there.key == key and there.graded:
            raise HostError(
                f"attempt {key.attempt} of {key.agent} on {key.task} is recorded, as {there.rollout_id}",
                hint="every attempt counts once; raise `attempts` for more",
                cause=ALREADY_RECORDED,
            )

    def _set_aside(self, final: Path, key: RolloutKey) -> None:
        try:
            label = "retry" if load_record(final).key == key else "changed"
        except DayflyError:
            label = "broken"
        number = 1
        while os.path.lexists(aside := final.with_name(f"{final.name}.{label}-{number}")):
            number += 1
        move_folder(final, aside)

    def recover(self) -> Recovered:
        """Bring the folder into a consistent state after a crash. Call it with `lock()` held; repeatable.

        Sealed, intact rollouts are moved to their place. What a killed rollout had written goes to
        `interrupted/`, without its disks.
        """
        published: list[RolloutRecord] = []
        interrupted: list[str] = []
        end_torn_line(self.path / "events.jsonl")
        with host_errors(f"recovering {self.path}"):
            for work in sorted(self._work.iterdir()) if self._work.is_dir() else ():
                record = self._roll_forward(work / "evidence")
                if record is not None:
                    published.append(record)
                elif self._keep_interrupted(work):
                    interrupted.append(work.name)
                remove_tree(work)
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
        return Recovered(tuple(published), tuple(interrupted))

    def _roll_forward(self, evidence: Path) -> RolloutRecord | None:
        if not (evidence / RECORD_NAME).is_file() or not is_intact(evidence):
            return None
        record = load_record(evidence)
        if record.job_id != self.job_id:
            return None
        try:
            self._place(record, evidence)
        except HostError as error:
            if error.cause != ALREADY_RECORDED:
                raise
            return None
        return record

    def _keep_interrupted(self, work: Path) -> bool:
        evidence = work / "evidence"
        with suppress(FileNotFoundError):
            (evidence / DISK_NAME).unlink()
        for half_made in evidence.glob(f".{RECORD_NAME}.*.tmp"):
            half_made.unlink()
        if not evidence.is_dir() or not any(evidence.iterdir()):
            return False
        make_folders(self.path / "interrupted")
        move_folder(evidence, self.path / "interrupted" / work.name)
        return True

    # --- reading -----------------------------------------------------------------------------------

    def rollout_path(self, key: RolloutKey) -> Path:
        """Where the result of an attempt is, or will be."""
        return self.path / "rollouts" / safe_component(key.task) / safe_component(key.agent) / str(key.attempt)

    def records(self, on_broken: OnBroken | None = None, *, sealed: bool = False) -> Iterator[RolloutRecord]:
        """The result of every attempt that has one, graded or not, by task, agent and attempt.

        A broken record is given to `on_broken`; without that, `HostError` names it. `sealed`: so is one that is
        not as it was sealed (its own content only; `verify_folder` checks every file).
        """
        for folder, label in self._folders():
            if label is None and (record := _load(folder, on_broken, sealed)) is not None:
                yield record

    def history(self, key: RolloutKey) -> list[RolloutRecord]:
        """Every start of an attempt that is on file, earlier ones first."""
        return [record for record, _ in self._starts(key)]

    def folder_of(self, rollout_id: str, on_broken: OnBroken | None = None) -> Path:
        """The folder of a rollout by its id, earlier starts included. Raises `NotFoundError`."""
        for folder, _ in self._folders():
            if (record := _load(folder, on_broken)) is not None and record.rollout_id == rollout_id:
                return folder
        raise NotFoundError(
            f"job {self.job_id} has no rollout {rollout_id}", hint=f"`dayfly show {self.job_id}` lists them"
        )

    @property
    def _work(self) -> Path:
        return self.path / "work"

    def _starts(self, key: RolloutKey) -> list[tuple[RolloutRecord, Path]]:
        place = self.rollout_path(key)
        found = []
        for folder in place.parent.glob(f"{key.attempt}*") if place.parent.is_dir() else ():
            match = _ATTEMPT.fullmatch(folder.name)
            if match and int(match[1]) == key.attempt:
                record = load_record(folder)
                if record.key == key:
                    found.append((record, folder))
        return sorted(found, key=lambda pair: (pair[0].started_unix, pair[0].retry))

    def _folders(self) -> Iterator[tuple[Path, str | None]]:
        """Published folders in a stable order, each with its label (`retry`, `changed`) or None."""
        for agent in sorted((self.path / "rollouts").glob("*/*")):
            attempts = []
            for entry in os.scandir(agent) if agent.is_dir() else ():
                if match := _ATTEMPT.fullmatch(entry.name):
                    attempts.append((int(match[1]), match[2] or "", int(match[3] or 0), entry.name))
            for _, label, _, name in sorted(attempts):
                yield agent / name, label or None


def _load(folder: Path, on_broken: OnBroken | None, sealed: bool = False) -> RolloutRecord | None:
    try:
        return load_sealed(folder) if sealed else load_record(folder)
    except DayflyError as error:
        if on_broken is None:
            raise
        on_broken(folder, error)
        return None


def _table(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise HostError(f"{path} does not hold a table", cause="broken_file")
    return data
