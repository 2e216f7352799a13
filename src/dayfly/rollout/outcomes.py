"""What happened → one outcome, and the cause that decided it."""

from __future__ import annotations

from dayfly.errors import (
    DayflyError,
    DiskFull,
    GuestRefused,
    InfraError,
    ProviderError,
    SandboxOom,
    Tampered,
    VerifierError,
)
from dayfly.model import Cause, Outcome, Phase, Verdict


def outcome_of(error: Exception, phase: Phase, on_agents_disk: bool) -> Outcome:
    """Where an exception leads. Whatever is not known to be someone else's fault is infra_error.

    A verifier that works on the agent's disk and finds it full has met the agent's work, not a fault of ours.
    """
    match error:
        case Tampered():
            return Outcome.TAMPERED
        case SandboxOom():
            return Outcome.SANDBOX_OOM if phase in ("agent", "collect") else Outcome.INFRA_ERROR
        case DiskFull() if phase in ("agent", "collect"):
            return Outcome.DISK_FULL
        case GuestRefused(cause="disk_full") if on_agents_disk:
            return Outcome.DISK_FULL
        case VerifierError():
            return Outcome.VERIFIER_ERROR
        case ProviderError():
            return Outcome.PROVIDER_ERROR
        case InfraError(cause="verify_timeout"):
            return Outcome.VERIFIER_ERROR
        case GuestRefused() if phase == "verify":
            return Outcome.VERIFIER_ERROR
        case GuestRefused() if phase == "agent":
            return Outcome.AGENT_ERROR
        case _:
            return Outcome.INFRA_ERROR


UNGRADED = (
    Outcome.CANCELLED,
    Outcome.INFRA_ERROR,
    Outcome.PROVIDER_ERROR,
    Outcome.VERIFIER_ERROR,
)


def decide(
    verdict: Verdict | None, failures: list[tuple[Outcome, Cause]]
) -> tuple[Outcome, Cause | None, tuple[Cause, ...]]:
    """The one outcome of a rollout, the cause that decided it, and the other causes in order of time.

    Tampering outweighs everything. Then a fault that is not the agent's: without a trustworthy verdict
    nothing is graded. Else the first of the agent's own faults; else the verdict.
    """
    ranked = sorted(failures, key=lambda f: 0 if f[0] is Outcome.TAMPERED else 1 if f[0] in UNGRADED else 2)
    if ranked:
        outcome, cause = ranked[0]
        return outcome, cause, tuple(c for _, c in failures if c is not cause)
    if verdict is None:
        cause = Cause(kind="no_verdict", message="the rollout ended without a verdict", phase="verify")
        return Outcome.VERIFIER_ERROR, cause, ()
    return (Outcome.PASSED if verdict.passed else Outcome.FAILED), None, ()


def cause_of(error: BaseException, phase: str) -> Cause:
    if isinstance(error, DayflyError):
        return Cause(kind=error.cause, message=error.message, hint=error.hint, phase=phase)
    return Cause(
        kind="unknown",
        message=f"{type(error).__name__}: {error}",
        hint="this is a fault in dayfly or in a plug-in; please report it with this rollout's folder",
        phase=phase,
    )
