"""What went wrong at a registry: skopeo's words → one of our causes, with what a person can do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dayfly.errors import HostError, ImageError, InfraError
from dayfly.images.names import Reference
from dayfly.images.skopeo import SkopeoFailed, TooSlow


@dataclass(frozen=True)
class Fault:
    cause: str
    says: str
    hint: str
    passes: bool = False
    """May be gone at the next attempt."""
    of_registry: bool = False
    """Tells of the whole registry, not of this image."""


_SLOW = Fault(
    "registry_slow",
    "is too slow",
    "try again later, or name a nearer mirror in registries.conf",
    passes=True,
    of_registry=True,
)
_FAULTS = (
    (
        r"no space left|disk quota",
        Fault("host_disk_full", "", "free some space: `dayfly image prune`, `df -h`"),
    ),
    (r"is blocked|blocked in", Fault("registry_blocked", "is blocked", "registries.conf of this host says so")),
    (
        r"\b429\b|toomanyrequests|too many requests|rate limit",
        Fault(
            "registry_rate_limited",
            "has had too many requests from here (429)",
            "wait, log in with `skopeo login`, or name a mirror in registries.conf",
            passes=True,
            of_registry=True,
        ),
    ),
    (
        r"x509|certificate|gave HTTP response to HTTPS|tls: ",
        Fault(
            "registry_tls",
            "cannot be trusted",
            "put its CA into /etc/containers/certs.d/HOST/, or say `insecure = true` in registries.conf",
        ),
    ),
    (
        r"unauthorized|authentication required|denied|invalid username|no basic auth|\b40[13]\b",
        Fault(
            "registry_auth",
            "refuses it: no or wrong credentials, or no such repository",
            "`skopeo login HOST` writes the auth file (REGISTRY_AUTH_FILE names another)",
        ),
    ),
    (
        r"manifest unknown|name unknown|blob unknown|\b404\b|repository .*not found",
        Fault(
            "image_not_found", "does not have it", "look for a misspelt name or tag, or `dayfly image import` it"
        ),
    ),
    (
        r"corrupted blob|did not match|does not match|digest mismatch",
        Fault(
            "digest_mismatch",
            "sent something else than the digest says",
            "a proxy between here and the registry may be damaging it; nothing of it was kept",
            passes=True,
        ),
    ),
    (
        r"unexpected EOF|expected \d+ bytes",
        Fault("image_truncated", "sent only a part", "try again; nothing half was kept", passes=True),
    ),
    (
        r"\b5\d\d\b|connection refused|connection reset|no such host|timeout|timed out|\bEOF\b|unreachable|"
        r"deadline exceeded|server misbehaving|broken pipe",
        Fault(
            "registry_unavailable",
            "cannot be reached or is failing",
            "try again later; is this host online? what is in the store is used without a network",
            passes=True,
            of_registry=True,
        ),
    ),
)
_OTHER = Fault("image_error", "did not deliver it", "try `skopeo inspect` by hand")
_DIGESTS = re.compile(r"sha256:[0-9a-f]{64}|:[0-9]{2,5}\b")


def understand(failure: SkopeoFailed) -> Fault:
    if isinstance(failure, TooSlow):
        return _SLOW
    words = _DIGESTS.sub("", str(failure))  # a digest or a port may hold 404, too
    for pattern, fault in _FAULTS:
        if re.search(pattern, words, re.IGNORECASE):
            return fault
    return _OTHER


def as_error(failure: SkopeoFailed, fault: Fault, reference: Reference) -> InfraError:
    said = " ".join(str(failure).split())[:400]
    if fault.cause == "host_disk_full":
        return HostError(f"{reference.pinned} could not be pulled: {said}", hint=fault.hint, cause=fault.cause)
    hint = f"{fault.hint.replace('HOST', reference.host)} (skopeo: {said})"
    return ImageError(
        f"{reference.pinned} could not be pulled: {reference.host} {fault.says}", hint=hint, cause=fault.cause
    )


def passes(error: InfraError) -> bool:
    """Whether the same pull may succeed another time."""
    return error.cause not in {fault.cause for _, fault in _FAULTS if not fault.passes} | {"wrong_architecture"}
