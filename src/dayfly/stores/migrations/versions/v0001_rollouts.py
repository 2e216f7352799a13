"""The first schema: one row per attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("job_id", sa.String(128), primary_key=True),
        sa.Column("task", sa.Text, primary_key=True),
        sa.Column("agent", sa.Text, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("rollout_id", sa.String(128), nullable=False),
        sa.Column("task_digest", sa.Text, nullable=False),
        sa.Column("agent_digest", sa.Text, nullable=False),
        sa.Column("retry", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("graded", sa.Boolean, nullable=False),
        sa.Column("passed", sa.Boolean),
        sa.Column("reward", sa.Float),
        sa.Column("isolation", sa.String(16)),
        sa.Column("verifier_class", sa.String(16), nullable=False),
        sa.Column("started_unix", sa.Float, nullable=False),
        sa.Column("finished_unix", sa.Float, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("rollouts_by_id", "rollouts", ["rollout_id"])
    op.create_index("rollouts_by_task", "rollouts", ["task", "agent"])
    op.create_index("rollouts_by_job", "rollouts", ["job_id", "outcome", "graded", "started_unix", "finished_unix"])


def downgrade() -> None:
    op.drop_table("rollouts")
