"""The builder's own image: Debian packages with buildah in it, made with mmdebstrap on this host.

Package sources, keys and proxies are those of this machine's apt. buildah 1.33 is the first that reads heredocs
and keeps owners right, so on an older Debian the next release is taken, if the same mirror has it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dayfly.errors import HostError
from dayfly.images.locks import locked
from dayfly.images.store import Image, ImageStore
from dayfly.process import run, which

BUILDER_NAME = "dayfly/builder:1"
"""Under which the builder is in the image store. The number counts the recipe's versions."""

PACKAGES = ("buildah", "netavark", "ca-certificates", "git", "python3-minimal", "tar", "util-linux", "mount")
"""netavark: buildah 1.39 wants it even where it makes no network. git: `ADD` of a repository.
python3-minimal: the relay of the guest's proxy."""

BETTER_DEBIAN = "trixie"
OLD_DEBIAN = ("bullseye", "bookworm")
"""Their buildah is older than 1.33."""

OLD_BUILDAH = "no heredocs; WORKDIR then COPY --chown can give the folder to that owner"

LEFT_OUT = (
    *("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*/LC_MESSAGES/*"),
    "/usr/share/bash-completion/*",
)
HINT = "install mmdebstrap (and uidmap for an ordinary user), or name another builder image with --builder-image"


@dataclass(frozen=True)
class Sources:
    """Where the builder's packages come from."""

    suite: str
    lines: tuple[str, ...]
    remark: str = ""
    """What its buildah cannot do; empty: nothing known."""


def _drop(line: str) -> None:
    pass


def ensure_builder(store: ImageStore, *, timeout_s: float = 900.0, say: Callable[[str], None] = _drop) -> Image:
    """The builder image `BUILDER_NAME` of `store`, made now if it is not there. Blocking.

    Raises `HostError` when it cannot be made.
    """
    if (found := store.find(BUILDER_NAME)) is not None:
        return found
    with locked(scratch_folder() / "builder.lock", timeout_s, what="the builder image"):
        if (found := store.find(BUILDER_NAME)) is not None:
            return found
        return make_builder(store, timeout_s=timeout_s, say=say)


def make_builder(store: ImageStore, *, timeout_s: float = 900.0, say: Callable[[str], None] = _drop) -> Image:
    """Make the builder image anew, of the newest packages; the name moves to it. Blocking. Raises `HostError`."""
    which("mmdebstrap", HINT)
    with tempfile.TemporaryDirectory(prefix="dayfly-builder-") as made:
        work = Path(made)
        sources = find_sources(work)
        tar = work / "builder.tar"
        say(f"making the image of builder VMs, once, from packages of {sources.suite}")
        if sources.remark:
            say(f"warning: {sources.remark}")
        run(
            debootstrap_command(sources, tar, PACKAGES, CUSTOMISE),
            timeout_s=timeout_s,
            input="\n".join(sources.lines).encode() + b"\n",
        )
        return store.import_image(tar, BUILDER_NAME, workdir="/")


def find_sources(work: Path) -> Sources:
    """The distribution's own lines of this machine's apt, with a newer suite where the own buildah is too old."""
    release = _os_release()
    codename = release.get("VERSION_CODENAME", "")
    found = _own_sources(work, codename)
    if release.get("ID") != "debian" or codename not in OLD_DEBIAN:
        return Sources(codename, tuple(f"deb {uri} {suite} {part}" for uri, suite, part in found))
    newer = tuple(
        dict.fromkeys(f"deb {uri} {BETTER_DEBIAN} {part}" for uri, suite, part in found if suite == codename)
    )
    if _has(newer, work):
        return Sources(BETTER_DEBIAN, newer)
    own = tuple(f"deb {uri} {suite} {part}" for uri, suite, part in found)
    return Sources(codename, own, f"{BETTER_DEBIAN} is not on this machine's mirror: {OLD_BUILDAH}")


def _os_release() -> dict[str, str]:
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        text = ""
    return {key: value.strip('"') for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}


def _own_sources(work: Path, codename: str) -> list[tuple[str, str, str]]:
    """(URI, suite, component) of the distribution itself; other vendors' stay out."""
    text = _index_targets([])
    if not text.strip():  # no package lists on this machine
        lists = _private_lists(work / "own")
        run(["apt-get", "-q", *lists, "update"], timeout_s=300)
        text = _index_targets(lists)
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    wanted = [r for r in rows if r[1] in (codename, f"{codename}-updates", f"{codename}-security")]
    own = [r for r in wanted if r[3] in ("Debian", "Ubuntu")] or wanted  # else: a private mirror, named its own way
    if not own:
        raise HostError(f"apt knows no source for {codename or 'this release'}", hint="check /etc/apt/sources.list")
    return list(dict.fromkeys((uri, suite, part) for uri, suite, part, _ in own))


def _index_targets(options: Sequence[str]) -> str:
    which("apt-get", "the builder image is made of Debian or Ubuntu packages; name another with --builder-image")
    shown = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)"
    argv = ["apt-get", *options, "indextargets", "--format", shown, "Created-By: Packages"]
    return run(argv, timeout_s=60, check=False).stdout.decode()


def _private_lists(folder: Path) -> list[str]:
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    pairs = (f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User=")
    return [word for pair in pairs for word in ("-o", pair)]


def _has(lines: Sequence[str], work: Path) -> bool:
    """Whether apt can read these sources with the keys of this machine."""
    listed = work / "newer.list"
    listed.write_text("\n".join(lines) + "\n")
    options = [*_private_lists(work / "newer"), "-o", f"Dir::Etc::SourceList={listed}"]
    options += ["-o", "Dir::Etc::SourceParts=/dev/null", "-o", "Acquire::Languages=none"]
    argv = ["apt-get", "-q", *options, "-o", "APT::Update::Error-Mode=any", "update"]
    return run(argv, timeout_s=120, check=False).returncode == 0


def debootstrap_command(
    sources: Sources, tar: Path, packages: Sequence[str], hooks: Sequence[str]
) -> list[str | Path]:
    """What makes a root filesystem of these packages; source lines are read from its standard input."""
    argv: list[str | Path] = ["mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(packages)}"]
    for keyring in (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "/usr/share/keyrings/ubuntu-archive-keyring.gpg",
        "/etc/apt/trusted.gpg.d",
        "/etc/apt/keyrings",
    ):
        argv += [f"--keyring={keyring}"] if Path(keyring).exists() else []
    argv += [f"--aptopt={option}" for option in _apt_transport()]
    argv += ['--aptopt=Apt::Install-Recommends "false"']
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    argv += [f"--customize-hook={hook}" for hook in hooks]
    return [*argv, sources.suite, tar, "-"]


def _apt_transport() -> list[str]:
    """How this machine's apt gets out: proxies, certificates, retries."""
    shown = run(["apt-config", "dump"], timeout_s=60, check=False).stdout.decode()
    return re.findall(r'^(Acquire::(?:https?::|Retries)[^ ]* ".+";)$', shown, re.MULTILINE)


CUSTOMISE = (
    'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/log/* "$1"/etc/apt/sources.list '
    '"$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
    ': >"$1/etc/resolv.conf"; : >"$1/etc/machine-id"; echo builder >"$1/etc/hostname"',
    'chroot "$1" buildah --version >&2',
)


def scratch_folder() -> Path:
    """Where big temporary files go: the cache, not /tmp, which may be in memory."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "dayfly" / "builds"
