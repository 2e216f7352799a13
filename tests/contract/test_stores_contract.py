"""The index under `check_store`; and stores that break a rule."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from dayfly.protocols import Store
from dayfly.stores import SqlStore
from dayfly.testing import check_store


def test_sqlite(tmp_path):
    check_store(lambda: SqlStore.open(tmp_path))
    check_store(lambda: SqlStore.open(tmp_path))


def test_sql_store_is_a_store(tmp_path):
    with SqlStore.open(tmp_path) as store:
        assert isinstance(store, Store)


class InMemory:
    """A table in memory; each flag is one way to be wrong."""

    def __init__(self, *, replace: bool = True, order: bool = True) -> None:
        self.records, self.replace, self.order = {}, replace, order

    def add(self, record):
        place = (record.job_id, record.task, record.agent, record.attempt)
        self.records[place if self.replace else (*place, len(self.records))] = record

    def add_many(self, records):
        return sum(1 for record in records if self.add(record) is None)

    def query(self, job_id=None):
        places = sorted(self.records) if self.order else list(self.records)
        return [self.records[p] for p in places if job_id in (None, p[0])]


@pytest.mark.parametrize(
    ("flags", "words"), [({"replace": False}, "after a retry"), ({"order": False}, "in order")]
)
def test_a_broken_store_fails_the_suite(flags, words):
    store = InMemory(**flags)

    @contextmanager
    def opened():
        yield store

    with pytest.raises(AssertionError, match=words):
        check_store(opened)


def test_a_store_that_forgets_fails_the_suite():
    @contextmanager
    def opened():
        yield InMemory()

    with pytest.raises(AssertionError, match="opened again"):
        check_store(opened)
