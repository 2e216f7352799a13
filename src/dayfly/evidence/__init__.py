"""Evidence: what is kept of a rollout, how it becomes durable, and how one sees that it is unchanged.

The files are the truth; every database is an index over them.
"""

from dayfly.evidence.digests import (
    DISK_DIGEST,
    canonical_json,
    fingerprint,
    readable_json,
    sha256_bytes,
    sha256_file,
    sha256_sparse,
)
from dayfly.evidence.durable import (
    append_event,
    publish,
    read_events,
    read_json,
    remove_tree,
    sync_tree,
    write_durable,
)
from dayfly.evidence.find import find_job, find_path
from dayfly.evidence.job_folder import (
    JobFolder,
    Recovered,
    list_jobs,
    new_job_id,
    new_rollout_id,
    remove_half_made,
    safe_component,
)
from dayfly.evidence.rollout_folder import DISK_NAME, RECORD_NAME, RolloutFolder
from dayfly.evidence.seal import Problem, load_record, seal, verify_folder

__all__ = [
    "DISK_DIGEST",
    "DISK_NAME",
    "RECORD_NAME",
    "JobFolder",
    "Problem",
    "Recovered",
    "RolloutFolder",
    "append_event",
    "canonical_json",
    "find_job",
    "find_path",
    "fingerprint",
    "list_jobs",
    "load_record",
    "new_job_id",
    "new_rollout_id",
    "publish",
    "read_events",
    "read_json",
    "readable_json",
    "remove_half_made",
    "remove_tree",
    "safe_component",
    "seal",
    "sha256_bytes",
    "sha256_file",
    "sha256_sparse",
    "sync_tree",
    "verify_folder",
    "write_durable",
]
