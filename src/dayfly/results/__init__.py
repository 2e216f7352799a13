"""What a job came to, gathered for comparing: by agent version and task."""

from dayfly.results.load import load_job_side, load_side, nothing_is_garbage, verify_evidence
from dayfly.results.side import Side, TaskResults

__all__ = ["Side", "TaskResults", "load_job_side", "load_side", "nothing_is_garbage", "verify_evidence"]
