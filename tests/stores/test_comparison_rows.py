"""What comparisons ask of the index: an old one gets it by migration, and it is answered from one index."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

from dayfly.evidence import canonical_json
from dayfly.model import Outcome, RolloutRecord, Usage, Verdict, VerifierClass
from dayfly.stores import INDEX_NAME, SqlStore, schema, version_of
from dayfly.stores.sql import connect
from dayfly.stores.tables import row_of

NEW = {"version", "mark", "tokens", "cost_usd", "disk_digest", "indexed_unix"}


def record(attempt: int, outcome: Outcome = Outcome.PASSED, **fields: object) -> RolloutRecord:
    values: dict[str, object] = {
        "rollout_id": f"r-{attempt}",
        "job_id": "job",
        "task": "org/task",
        "task_digest": "sha256:t",
        "agent": "coder",
        "agent_digest": "sha256:a",
        "attempt": attempt,
        "outcome": outcome,
        "verdict": Verdict(reward=0.5, passed=outcome is Outcome.PASSED)
        if outcome is not Outcome.INFRA_ERROR
        else None,
        "reward": 0.5 if outcome is not Outcome.INFRA_ERROR else None,
        "verifier_class": VerifierClass.SHARED,
        "isolation": "tcg",
        "disk_digest": "sha256:d",
        "started_unix": 100.0 + attempt,
        "finished_unix": 101.5 + attempt,
        "usage": Usage(tokens_in=10, tokens_out=1, cost_usd=0.5),
    }
    return RolloutRecord.model_validate(values | fields)


RECORDS = [
    record(1),
    record(2, Outcome.FAILED, usage=Usage(tokens_in=10)),
    record(3, Outcome.INFRA_ERROR, isolation=None, disk_digest=""),
    record(1, Outcome.AGENT_TIMEOUT, task="other", isolation="kvm"),
    record(12, Outcome.TAMPERED, task="other", isolation="kvm"),
]


def old_index(folder: Path, count: int) -> list[RolloutRecord]:
    """An index with the first schema, and what is in it."""
    store = SqlStore.open(folder)
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    with connect(store.url).connect().execution_options(dayfly_write=True) as connection, connection.begin():
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    records = [*RECORDS, *(record(n, task="many") for n in range(1, count))]
    with sqlite3.connect(folder / INDEX_NAME) as direct:
        names = {row[1] for row in direct.execute("PRAGMA table_info(rollouts)")}
        assert not names & NEW
        for one in records:
            row = {k: v for k, v in row_of(one).items() if k not in NEW}
            marks = ", ".join(f":{name}" for name in row)
            direct.execute(f"INSERT INTO rollouts ({', '.join(row)}) VALUES ({marks})", row)
    direct.close()
    return records


def test_an_old_index_is_migrated_with_what_its_records_say(tmp_path: Path) -> None:
    records = old_index(tmp_path, count=2500)
    with SqlStore.open(tmp_path) as store:
        assert sorted(map(canonical_json, store.iterate())) == sorted(map(canonical_json, records))
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        direct.row_factory = sqlite3.Row
        rows = {(r["task"], r["attempt"]): dict(r) for r in direct.execute("SELECT * FROM rollouts")}
    direct.close()
    assert len(rows) == len(records)
    for one in records:
        wanted = row_of(one) | {"indexed_unix": one.finished_unix}
        got = rows[one.task, one.attempt]
        assert got == wanted | {"graded": int(one.graded), "passed": got["passed"]}


def test_rows_of_a_task_are_added_up_by_what_they_agree_in(tmp_path: Path) -> None:
    with SqlStore.open(tmp_path) as store:
        store.add_many(RECORDS)
        store.add_many([record(1, agent="another"), record(1, job_id="job2")])
        rows = store.task_rows("job", "coder", 100)
        fewer = store.task_rows("job", "coder", 1)
    found = {(r.task, r.graded, r.isolation): r for r in rows}
    assert set(found) == {("org/task", True, "tcg"), ("org/task", False, None), ("other", True, "kvm")}
    row = found["org/task", True, "tcg"]
    assert row.version == version_of("sha256:t", "sha256:a")
    assert (row.count, sorted(row.attempts), row.reward_sum, row.seconds_sum) == (2, sorted("1P2F"), 1.0, 3.0)
    assert (row.tokens_known, row.tokens_sum, row.cost_known, row.cost_sum) == (1, 11, 1, 0.5)
    assert (row.started_unix, row.finished_unix, row.verifier_class) == (101.0, 103.5, "shared")
    assert found["org/task", False, None].attempts == "3i"
    assert found["other", True, "kvm"].attempts in ("1t12x", "12x1t")
    assert {(r.task, r.count) for r in fewer} == {("org/task", 1), ("other", 1)}


def test_graded_rollouts_are_counted_by_version(tmp_path: Path) -> None:
    with SqlStore.open(tmp_path) as store:
        store.add_many(RECORDS)
        version = version_of("sha256:t", "sha256:a")
        counted = store.graded_versions("job", 10)
    assert counted == {("coder", "org/task", version): 2, ("coder", "other", version): 1}


@pytest.mark.parametrize("question", ["task_rows", "graded_versions"])
def test_a_comparison_reads_no_record(tmp_path: Path, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with SqlStore.open(tmp_path) as store:
        fetch = store._fetch
        monkeypatch.setattr(
            store,
            "_fetch",
            lambda s: (
                asked.append(str(s.compile(store._engine, compile_kwargs={"literal_binds": True}))) or fetch(s)
            ),
        )
        store.task_rows("j", "a", 5) if question == "task_rows" else store.graded_versions("j", 5)
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        plan = str(direct.execute(f"EXPLAIN QUERY PLAN {asked[0]}").fetchall())
    direct.close()
    assert "COVERING INDEX" in plan
    assert question != "task_rows" or "TEMP B-TREE" not in plan, "the groups lie in order"


def test_a_migrated_index_is_the_current_one(tmp_path: Path) -> None:
    old_index(tmp_path, count=1)
    SqlStore.open(tmp_path).close()
    with sqlite3.connect(tmp_path / INDEX_NAME) as direct:
        assert direct.execute("SELECT version_num FROM alembic_version").fetchone() == (schema.CURRENT,)
        (text,) = direct.execute("SELECT record FROM rollouts WHERE attempt = 12").fetchone()
    direct.close()
    assert RolloutRecord.model_validate(json.loads(text)) == RECORDS[-1]
