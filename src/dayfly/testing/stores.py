"""What every store must do: `check_store`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from dayfly.evidence import new_job_id
from dayfly.model import Cause, Fingerprint, Outcome, PhaseTime, RolloutRecord, Verdict
from dayfly.protocols import Store
from dayfly.testing.samples import expect, sample_record, sample_spec

AT_ONCE = 4
EACH = 10


def check_store(open_store: Callable[[], AbstractContextManager[Store]]) -> None:
    """Raises `AssertionError` with a sentence for the first rule that does not hold.

    `open_store` opens the same store each time; what is in it already is left alone.
    """
    job, other = new_job_id(), new_job_id()
    with open_store() as store:
        expect(store.query(job) == [], "a job that nobody has heard of has rollouts")
        _gives_back_what_it_was_given(store, job)
        _replaces_an_attempt(store, job)
        _keeps_jobs_apart(store, job, other)
        _takes_many_at_once(store, new_job_id())
        _takes_records_from_many_threads(store, new_job_id())
    with open_store() as again:
        expect(len(again.query(job)) == 4, "what was added is not there when the store is opened again")


def _full_record(job: str) -> RolloutRecord:
    """Texts of every kind, numbers that a careless store rounds, and fields that are empty elsewhere."""
    odd = 'ünï \u2028 \U0001f98b "quotes" \\ %41 \x7f'
    return sample_record(
        sample_spec(1, job_id=job),
        outcome=Outcome.TAMPERED,
        reward=0.1 + 0.2,
        rewards={odd: -1e-300, "b": 1e300},
        verdict=Verdict(reward=0.1 + 0.2, passed=False, details={"list": [1, None, {"deep": odd}]}),
        cause=Cause(kind="x", message=odd, hint=None),
        further_causes=(Cause(kind="y", message=""),),
        start_fingerprint=Fingerprint(digest="sha256:3", parts={"a": {"b": 1}}),
        phases=(PhaseTime(name="agent", started_unix=1.5, seconds=2.25),),
        started_unix=1_764_000_000.123456,
        seed=2**47 + 1,
        notes=(odd,),
        files={"a%FFb": "sha256:4"},
    )


def _gives_back_what_it_was_given(store: Store, job: str) -> None:
    full = _full_record(job)
    store.add(full)
    expect(store.query(job) == [full], "a record does not come back as it was added")


def _replaces_an_attempt(store: Store, job: str) -> None:
    second = sample_spec(2, job_id=job)
    store.add(sample_record(second, outcome=Outcome.INFRA_ERROR, reward=None, verdict=None))
    retried = sample_record(second, retry=1)
    store.add(retried)
    store.add(retried)
    got = [r for r in store.query(job) if r.attempt == 2]
    expect(got == [retried], f"after a retry the attempt is there as {[r.outcome.value for r in got]}")


def _keeps_jobs_apart(store: Store, job: str, other: str) -> None:
    for attempt in (10, 9):
        store.add(sample_record(sample_spec(attempt, job_id=job)))
    store.add(sample_record(sample_spec(1, job_id=other)))
    expect([r.attempt for r in store.query(job)] == [1, 2, 9, 10], "the rollouts of a job are not in order")
    expect([r.job_id for r in store.query(other)] == [other], "the rollouts of two jobs are mixed")
    everything = {r.job_id for r in store.query()}
    expect({job, other} <= everything, "without a job's id not all jobs are given")


def _takes_many_at_once(store: Store, job: str) -> None:
    records = [sample_record(sample_spec(a, job_id=job)) for a in range(1, 1201)]
    expect(store.add_many(iter(records)) == len(records), "add_many() does not say how many it took")
    expect(store.add_many([]) == 0, "add_many() of nothing took something")
    expect(store.query(job) == records, "what was added at once does not come back")


def _takes_records_from_many_threads(store: Store, job: str) -> None:
    specs = [sample_spec(a, task=f"t{n}", job_id=job) for n in range(AT_ONCE) for a in range(1, EACH + 1)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda spec: store.add(sample_record(spec)), specs))
    got = [(r.task, r.attempt) for r in store.query(job)]
    expect(got == [(s.key.task, s.key.attempt) for s in specs], "records added at the same time are lost")
