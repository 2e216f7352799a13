"""Image references: `name[:tag][@digest]`, or a digest alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dayfly.errors import ConfigError

_WORD = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:[0-9]))(?::[0-9]+)?"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_WORD}(?:/{_WORD})*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?"
    rf"(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{12,64}")


@dataclass(frozen=True)
class Reference:
    """`name` is `repository:tag`, or empty for a digest alone; `digest` may be a prefix then, else empty."""

    name: str
    digest: str = ""

    @property
    def repository(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def pinned(self) -> str:
        """What it is stored and pulled as: `repository@digest` (a tag is idle beside a digest), else `name`."""
        return f"{self.repository}@{self.digest}" if self.digest and self.name else self.name

    @property
    def host(self) -> str:
        """The registry, as the name says it; where `registries.conf` sends it is not looked at."""
        first, slash, _ = self.name.partition("/")
        return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def parse_reference(text: str) -> Reference:
    """Normalise as Docker does: `docker.io/library/` dropped, tag `latest` added. Raises `ConfigError`."""
    text = text.strip()
    if _DIGEST.fullmatch(text):
        return Reference("", text)
    match = _REFERENCE.fullmatch(text) if len(text) <= 512 else None
    if match is None:
        raise ConfigError(
            f"{text[:100]!r} is not an image name",
            hint="write name[:tag] in lower case, for example dayfly/demo:latest",
        )
    name = match["name"]
    for prefix in ("docker.io/", "index.docker.io/"):
        name = name.removeprefix(prefix)
    name = name.removeprefix("library/")
    return Reference(f"{name}:{match['tag'] or 'latest'}", match["digest"] or "")
