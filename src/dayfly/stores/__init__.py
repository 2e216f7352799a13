"""Indexes over job folders, for questions that would be slow to ask of a million files.

Importing this imports SQLAlchemy; `dayfly.evidence` does not.
"""

from dayfly.stores.behind import Behind
from dayfly.stores.sql import INDEX_NAME, JobRow, Reindexed, SqlStore, TaskRow
from dayfly.stores.tables import version_of

__all__ = ["INDEX_NAME", "Behind", "JobRow", "Reindexed", "SqlStore", "TaskRow", "version_of"]
