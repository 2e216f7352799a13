from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from dayfly.errors import ConfigError, HostError
from dayfly.evidence import JobFolder
from dayfly.model import Cause, Outcome, RolloutRecord, Verdict, VerifierClass
from dayfly.protocols import Store
from dayfly.stores import INDEX_NAME, SqlStore, schema
from dayfly.stores.sql import connect
from dayfly.stores.tables import METADATA


def record(attempt: int = 1, outcome: Outcome = Outcome.PASSED, **fields: object) -> RolloutRecord:
    values: dict[str, object] = {
        "rollout_id": f"r-{attempt}-{outcome}",
        "job_id": "job",
        "task": "org/task",
        "task_digest": "sha256:t",
        "agent": "oracle",
        "agent_digest": "sha256:a",
        "attempt": attempt,
        "outcome": outcome,
        "verdict": Verdict(reward=1.0, passed=True) if outcome is Outcome.PASSED else None,
        "reward": 1.0 if outcome is Outcome.PASSED else None,
        "verifier_class": VerifierClass.SHARED,
        "isolation": "tcg",
        "started_unix": 100.0 + attempt,
        "finished_unix": 101.5 + attempt,
    }
    return RolloutRecord.model_validate(values | fields)


def publish(job: JobFolder, result: RolloutRecord) -> RolloutRecord:
    with job.rollout(result.rollout_id) as work:
        work.write("f", b"x")
        return job.publish_rollout(result, work)


# --- what goes in comes out ----------------------------------------------------------------------


def test_records_come_back_whole_and_in_order(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path)
    assert isinstance(store, Store)
    cause = Cause(kind="k", message="bytes \udcff, unicode ü")
    records = [record(10), record(2, Outcome.INFRA_ERROR, cause=cause), record(1, job_id="other")]
    for one in records:
        store.add(one)
    assert store.query("job") == [records[1], records[0]]
    assert store.query() == [records[1], records[0], records[2]]
    assert store.query("absent") == []
    assert store.find(records[1].rollout_id) == records[1]
    assert store.find("absent") is None


def test_typed_columns_can_be_asked(tmp_path: Path) -> None:
    with SqlStore.open(tmp_path) as store:
        store.add_many([record(1), record(2, Outcome.INFRA_ERROR), record(3, Outcome.FAILED, job_id="job2")])
        assert [r.attempt for r in store.iterate(outcome=Outcome.INFRA_ERROR)] == [2]
        assert [r.attempt for r in store.iterate("job", agent="oracle", task="org/task")] == [1, 2]
        assert store.outcome_counts("job") == {Outcome.PASSED: 1, Outcome.INFRA_ERROR: 1}
        jobs = [(j.job_id, j.rollouts, j.graded, j.started_unix, j.finished_unix) for j in store.jobs()]
        assert jobs == [("job", 2, 1, 101.0, 103.5), ("job2", 1, 1, 103.0, 104.5)]
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        query = "SELECT outcome, passed, reward, seconds FROM rollouts WHERE attempt = 1"
        assert direct.execute(query).fetchall() == [("passed", 1, 1.0, 1.5)]
    direct.close()


def test_the_same_attempt_is_one_row(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path)
    store.add(record(1, Outcome.INFRA_ERROR))
    store.add(record(1))
    store.add(record(1))
    assert [r.outcome for r in store.query()] == [Outcome.PASSED]


def test_more_than_a_page_comes_in_order_without_gaps(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path)
    assert store.add_many(record(n, task=f"t{n % 7}") for n in range(2500)) == 2500
    seen = [(r.task, r.attempt) for r in store.iterate()]
    assert len(seen) == 2500
    assert seen == sorted(seen)


def test_reading_does_not_block_writing(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path)
    store.add_many(record(n) for n in range(1500))
    reading = store.iterate()
    next(reading)
    store.add(record(5000))
    assert sum(1 for _ in reading) == 1500


# --- many at once --------------------------------------------------------------------------------

WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from dayfly.model import RolloutRecord
from dayfly.stores import SqlStore

folder, job_id = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
store = SqlStore.open(folder)

def add(n):
    store.add(RolloutRecord(
        rollout_id=f"{job_id}-{n}", job_id=job_id, task="t", task_digest="d", agent="a", agent_digest="d",
        attempt=n, outcome="passed", verifier_class="shared", started_unix=0, finished_unix=1,
    ))

with ThreadPoolExecutor(100) as pool:
    list(pool.map(add, range(200)))
"""


def test_two_processes_open_and_write_with_two_hundred_threads(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:  # both now make the schema at once
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        _, errors = child.communicate(timeout=180)
        assert child.returncode == 0, errors
    with SqlStore.open(tmp_path) as store:
        assert [(j.job_id, j.rollouts) for j in store.jobs()] == [("one", 200), ("two", 200)]


def test_one_process_opens_many_times_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        stores = list(pool.map(lambda _: SqlStore.open(tmp_path), range(16)))
    stores[0].add(record())
    assert all(len(s.query()) == 1 for s in stores)


def test_an_index_held_by_another_is_busy_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqlStore.open(tmp_path).close()
    monkeypatch.setattr("dayfly.stores.sql.BUSY_TIMEOUT_S", 0.1)
    store = SqlStore.open(tmp_path)
    other = sqlite3.connect(tmp_path / INDEX_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(HostError) as caught:
        store.add(record())
    assert caught.value.cause == "index_busy"
    other.execute("COMMIT")
    other.close()
    store.add(record())
    assert len(store.query()) == 1


# --- the index is only an index ------------------------------------------------------------------


def test_rebuild_makes_the_rows_from_the_files(tmp_path: Path) -> None:
    job = JobFolder.create(tmp_path, "job", {}, {})
    publish(job, record(1, Outcome.INFRA_ERROR))
    whole = [publish(job, record(n)) for n in (1, 2)]
    store = SqlStore.open(tmp_path)
    store.add(record(9))
    store.add(record(1, job_id="gone"))
    assert store.rebuild(tmp_path) == type(store.rebuild(tmp_path))(jobs=1, rollouts=2)
    assert store.query("job") == whole
    assert len(store.query("gone")) == 1
    store.rebuild(tmp_path, forget_missing=True)
    assert store.query() == whole


def test_rebuild_goes_on_past_a_broken_record_and_names_it(tmp_path: Path) -> None:
    job = JobFolder.create(tmp_path, "job", {}, {})
    first, second = (publish(job, record(n)) for n in (1, 2))
    broken = job.rollout_path(first.key)
    (broken / "rollout.json").write_text("{")
    result = SqlStore.reindex(tmp_path)
    assert (result.rollouts, [path for path, _ in result.broken]) == (1, [broken])
    assert SqlStore.open(tmp_path).query() == [second]


def break_header(path: Path) -> None:
    path.write_bytes(b"this is not a database, it only has its name" * 100)


def break_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def drop_table(path: Path) -> None:
    with sqlite3.connect(path) as direct:
        direct.execute("DROP TABLE rollouts")
    direct.close()


def make_newer(path: Path) -> None:
    with sqlite3.connect(path) as direct:
        direct.execute("UPDATE alembic_version SET version_num = '9999'")
    direct.close()


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (break_header, "index_broken"),
        (break_middle, "index_broken"),
        (cut_short, "index_broken"),
        (drop_table, "index_broken"),
        (make_newer, "index_newer"),
    ],
)
def test_a_damaged_index_is_named_and_made_anew(tmp_path: Path, damage: Callable[[Path], None], cause: str) -> None:
    job = JobFolder.create(tmp_path, "job", {}, {})
    whole = [publish(job, record(n)) for n in range(1, 30)]
    SqlStore.reindex(tmp_path)
    damage(tmp_path / INDEX_NAME)
    with pytest.raises(HostError) as caught:
        SqlStore.open(tmp_path).query()
    assert caught.value.cause == cause
    assert INDEX_NAME in caught.value.message or cause == "index_newer"
    assert "dayfly gc --reindex" in (caught.value.hint or "")
    assert SqlStore.reindex(tmp_path).rollouts == 29
    assert SqlStore.open(tmp_path).query() == whole


def test_a_killed_migration_leaves_nothing_half_made(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from alembic.operations import Operations as O\n"
        "from dayfly.stores import SqlStore\n"
        "O.create_index = lambda *a, **k: os.kill(os.getpid(), 9)\n"  # after the table was made
        "SqlStore.open(Path(sys.argv[1]))"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(argv, timeout=60, check=False).returncode == -9
    store = SqlStore.open(tmp_path)
    store.add(record())
    assert len(store.query()) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="absent"):
        SqlStore.open(tmp_path / "absent")


def test_only_known_databases_are_accepted() -> None:
    for url in ("mysql://host/db", "nonsense://"):
        with pytest.raises(ConfigError):
            SqlStore(url)


# --- schema --------------------------------------------------------------------------------------


def test_migrations_lead_to_the_tables_and_to_the_stated_revision(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path)
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == schema.CURRENT
    with connect(store.url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_the_index_uses_the_rollback_journal(tmp_path: Path) -> None:
    SqlStore.open(tmp_path).add(record())
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        assert direct.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    direct.close()


@pytest.mark.parametrize(
    ("question", "index"),
    [
        ("SELECT record FROM rollouts WHERE job_id = 'j'", "USING INDEX"),
        ("SELECT job_id, count(*), sum(graded) FROM rollouts GROUP BY job_id", "USING COVERING INDEX"),
        ("SELECT outcome, count(*) FROM rollouts WHERE job_id = 'j' GROUP BY outcome", "USING COVERING INDEX"),
        ("SELECT record FROM rollouts WHERE rollout_id = 'r'", "USING INDEX"),
    ],
)
def test_questions_use_an_index(tmp_path: Path, question: str, index: str) -> None:
    SqlStore.open(tmp_path).close()
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        plan = str(direct.execute(f"EXPLAIN QUERY PLAN {question}").fetchall())
    direct.close()
    assert index in plan


def test_evidence_comes_without_sqlalchemy_and_imports_write_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, json, dayfly.evidence; before = 'sqlalchemy' in sys.modules\n"
        "import dayfly.stores, dayfly.report\n"
        "print(json.dumps([before, 'alembic' in sys.modules, 'scipy' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, False]
    assert list(tmp_path.iterdir()) == []
