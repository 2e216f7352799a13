"""Fault case 22: the files of a job belong to whoever runs it, and only to them; they can delete them.

As root, file modes mean nothing, so these run in a child with an ordinary user id.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dayfly.errors import HostError
from dayfly.evidence import JobFolder, remove_tree, verify_folder
from dayfly.model import Outcome, RolloutRecord, VerifierClass

USER = 1000


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    if os.getuid() == 0:
        os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


def as_user(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_files_are_the_callers_private_and_deletable(home: Path) -> None:
    record = RolloutRecord(
        rollout_id="r",
        job_id="j",
        task="t",
        task_digest="d",
        agent="a",
        agent_digest="d",
        attempt=1,
        outcome=Outcome.PASSED,
        verifier_class=VerifierClass.SHARED,
        started_unix=0,
        finished_unix=1,
    )

    def work() -> None:
        os.umask(0)
        job = JobFolder.create(home / "jobs", "j", {}, {})
        with job.lock(), job.rollout("r") as folder:
            # As a guest may have had it: nobody may enter, everybody may write.
            (folder.folder / "artifacts" / "sealed-off").mkdir(parents=True)
            (folder.folder / "artifacts" / "sealed-off" / "f").write_text("x")
            (folder.folder / "artifacts" / "sealed-off" / "f").chmod(0o000)
            (folder.folder / "artifacts" / "sealed-off").chmod(0o000)
            (folder.folder / "artifacts" / "open").write_text("x")
            (folder.folder / "artifacts" / "open").chmod(0o777)
            (folder.scratch / "locked" / "in").mkdir(parents=True)
            (folder.scratch / "locked").chmod(0o000)
            sealed = job.publish_rollout(record, folder)
        assert set(sealed.files) == {"artifacts/sealed-off/f", "artifacts/open"}
        assert verify_folder(job.rollout_path(record.key)) == []
        for path in (home / "jobs").rglob("*"):
            info = path.lstat()
            assert info.st_uid == os.getuid()
            assert stat.S_IMODE(info.st_mode) == (0o700 if path.is_dir() else 0o600), path
        shutil.rmtree(home / "jobs")

    as_user(work)
    assert list(home.iterdir()) == []


def test_what_cannot_be_written_is_said_with_its_place(home: Path) -> None:
    def work() -> None:
        (home / "jobs").mkdir(mode=0o500)
        with pytest.raises(HostError, match="jobs") as caught:
            JobFolder.create(home / "jobs", "j", {}, {})
        assert "owns the folder" in str(caught.value)

    as_user(work)


def test_locked_folders_are_removed(home: Path) -> None:
    def work() -> None:
        (home / "a" / "b" / "c").mkdir(parents=True)
        (home / "a" / "b" / "f").write_text("x")
        (home / "a" / "b").chmod(0o000)
        (home / "a").chmod(0o000)
        remove_tree(home / "a")

    as_user(work)
    assert list(home.iterdir()) == []
