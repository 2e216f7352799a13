"""Run by Alembic, with the connection that `dayfly.stores.schema` hands over."""

from alembic import context

from dayfly.stores.tables import METADATA

# SQLite can roll back DDL once the driver's own transaction handling is off (see `sql.connect`), so a
# process that is killed half-way leaves no half-made schema.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
