"""Bringing a database to the current schema, with any number of processes opening it at once."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from dayfly.errors import HostError

CURRENT = "0002"
"""The newest revision in `migrations/versions`; a test keeps the two equal."""
REINDEX = "the files of the jobs are whole: `dayfly gc --reindex` makes the index anew from them"
LOCK_TIMEOUT_S = 60.0

_MIGRATIONS = Path(__file__).parent / "migrations"
_alembic = threading.Lock()  # Alembic keeps its context in module globals


def bring_up_to_date(engine: Engine, lock_file: Path | None) -> None:
    """Create or migrate the schema. `lock_file` is for SQLite; a server locks by itself.

    Raises `HostError` with cause `index_newer` when a newer dayfly made the index.
    """
    with engine.connect() as connection:
        if _revision(connection) == CURRENT:  # without importing Alembic, which is slow
            return
    with _alembic, _file_lock(lock_file):
        with engine.connect().execution_options(dayfly_write=True) as connection, connection.begin():
            if lock_file is None:
                connection.execute(text("SELECT pg_advisory_xact_lock(71946257)"))
            _upgrade(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    revision = _revision(connection)
    if revision is not None and revision not in known:
        raise HostError(
            f"the index has schema {revision}, which this dayfly does not know",
            hint=f"upgrade dayfly; or, as {REINDEX}",
            cause="index_newer",
        )
    command.upgrade(config, "head")


@contextmanager
def _file_lock(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise HostError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:g} s",
                        hint="look for a dayfly that hangs",
                        cause="index_busy",
                    ) from error
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
