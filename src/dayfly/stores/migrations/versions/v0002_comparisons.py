"""What comparisons add up, as columns of their own, and an index that covers it."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

PAGE = 1000
KEY = ("job_id", "task", "agent", "attempt")


def upgrade() -> None:
    for column in (
        sa.Column("version", sa.String(16)),
        sa.Column("mark", sa.String(1)),
        sa.Column("tokens", sa.BigInteger),
        sa.Column("cost_usd", sa.Float),
        sa.Column("disk_digest", sa.Text),
        sa.Column("indexed_unix", sa.Float),
    ):
        op.add_column("rollouts", column)
    _fill()
    op.create_index(
        "rollouts_by_version",
        "rollouts",
        [
            "job_id", "agent", "task", "version", "graded", "isolation", "verifier_class", "disk_digest",
            "attempt", "mark", "reward", "started_unix", "finished_unix", "tokens", "cost_usd", "indexed_unix",
        ],
    )  # fmt: skip


def _fill() -> None:
    """The new columns of old rows, from their records; page by page, as there may be a million.

    Rows count as made when their rollouts ended: where the files say otherwise, the files are read.
    """
    from dayfly.model import RolloutRecord
    from dayfly.stores.tables import compared

    names = (
        *KEY,
        "record",
        "finished_unix",
        "version",
        "mark",
        "tokens",
        "cost_usd",
        "disk_digest",
        "indexed_unix",
    )
    table = sa.table("rollouts", *(sa.column(name) for name in names))
    key = [table.c[name] for name in KEY]
    page = sa.select(*key, table.c.finished_unix, table.c.record).order_by(*key).limit(PAGE)
    filling = table.update().where(*(table.c[name] == sa.bindparam(f"key_{name}") for name in KEY))
    after = None
    while rows := op.get_bind().execute(page if after is None else page.where(sa.tuple_(*key) > after)).all():
        values = []
        for *place, finished, text in rows:
            record = RolloutRecord.model_validate(json.loads(text))
            where = {f"key_{name}": value for name, value in zip(KEY, place, strict=True)}
            values.append(where | compared(record) | {"indexed_unix": finished})
        op.get_bind().execute(filling, values)
        after = sa.tuple_(*(sa.literal(value) for value in rows[-1][:4]))


def downgrade() -> None:
    op.drop_index("rollouts_by_version", "rollouts")
    for name in ("version", "mark", "tokens", "cost_usd", "disk_digest", "indexed_unix"):
        op.drop_column("rollouts", name)
