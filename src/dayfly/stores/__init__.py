"""Indexes over job folders, for questions that would be slow to ask of a million files.

Importing this imports SQLAlchemy; `dayfly.evidence` does not.
"""

from dayfly.stores.behind import Behind
from dayfly.stores.sql import INDEX_NAME, JobRow, Reindexed, SqlStore

__all__ = ["INDEX_NAME", "Behind", "JobRow", "Reindexed", "SqlStore"]
