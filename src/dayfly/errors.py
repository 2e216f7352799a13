"""Every error dayfly raises on purpose.

The tree, with the exit code of the command line and the outcome of a rollout that it leads to:

    DayflyError                      exit 4
    ├── UsageError                   exit 2   what the person wrote cannot be used
    │   ├── ConfigError              a job file, option or environment variable
    │   ├── TaskError                a task folder
    │   └── NotFoundError            a job, rollout or image that is not there
    ├── NeedsDecision                exit 2   changed inputs on resume; a flag decides
    ├── InfraError                   infra_error: image, boot, lost guest, host
    │   ├── ImageError
    │   ├── BootError                a VM did not start, or a clone did not confirm
    │   ├── GuestLost                the guest agent stopped answering, or broke the protocol
    │   └── HostError                disk full, missing program, permission on the host
    ├── GuestRefused                 the guest agent answered with an error for one request
    │   └── LimitError               an argument list, environment or transfer over a limit
    ├── SandboxOom                   sandbox_oom: the workload reached its memory limit
    ├── DiskFull                     disk_full: the workload filled its disk
    ├── AgentError                   agent_error: the agent program failed
    ├── ProviderError                provider_error: the model's service failed
    ├── VerifierError                verifier_error: no usable verdict
    └── Tampered                     tampered: a planted or changed verdict

An exception that is not in this tree and ends a rollout is an `infra_error` (unknown cause).
"""

from __future__ import annotations


class DayflyError(Exception):
    """An error that says what is wrong, where, and what to do next.

    `message` is one sentence without a full stop at its end; `hint` is what the reader can do;
    `cause` is the stable word that records carry.
    """

    exit_code = 4
    cause = "error"

    def __init__(self, message: str, *, hint: str | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if cause is not None:
            self.cause = cause

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class UsageError(DayflyError):
    exit_code = 2
    cause = "usage"


class ConfigError(UsageError):
    cause = "config"


class TaskError(UsageError):
    cause = "task"


class NotFoundError(UsageError):
    cause = "not_found"


class NeedsDecision(DayflyError):
    exit_code = 2
    cause = "needs_decision"


class InfraError(DayflyError):
    cause = "infra"


class ImageError(InfraError):
    cause = "image_error"


class BootError(InfraError):
    cause = "boot_failed"


class GuestLost(InfraError):
    cause = "guest_lost"


class HostError(InfraError):
    cause = "host_error"


class GuestRefused(DayflyError):
    cause = "guest_refused"


class LimitError(GuestRefused):
    cause = "limit"


class SandboxOom(DayflyError):
    cause = "sandbox_oom"


class DiskFull(DayflyError):
    cause = "disk_full"


class AgentError(DayflyError):
    cause = "agent_error"


class ProviderError(DayflyError):
    cause = "provider_error"


class VerifierError(DayflyError):
    cause = "verifier_error"


class Tampered(DayflyError):
    cause = "tampered"
