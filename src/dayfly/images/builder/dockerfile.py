"""What the host must know of a Dockerfile: its instructions with their lines, and the images it builds on.

Building is buildah's work. This finds which images to have ready before a builder starts, and turns buildah's
`STEP 3/5` back into a line of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dayfly.errors import ImageError

MAX_SIZE = 1 << 20
_HEREDOC = re.compile(r"<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2")
_DIRECTIVE = re.compile(r"^#\s*([a-z]+)\s*=\s*(\S+)\s*$", re.IGNORECASE)
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_VARIABLE = re.compile(r"\\(.)|\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-+])([^}]*))?\})")


@dataclass(frozen=True)
class Instruction:
    word: str
    """In capitals: FROM, RUN, …"""
    rest: str
    """What follows, continued lines joined; without heredocs."""
    line: int
    """Where it begins, from 1."""
    stage: int
    """From 1; 0 for an ARG before the first FROM."""
    step: int
    """Within its stage, from 1: the FROM itself."""

    @property
    def text(self) -> str:
        return f"{self.word} {self.rest}"


def parse_dockerfile(text: str) -> tuple[Instruction, ...]:
    """Raises `ImageError` for a file without a FROM; what else is wrong is left to the builder to say."""
    lines = text.removeprefix("\ufeff").splitlines()
    escape = _escape_character(lines)
    found: list[Instruction] = []
    stage = step = at = 0
    while at < len(lines):
        begun = at
        joined, at = _joined(lines, at, escape)
        word, _, rest = joined.strip().partition(" ")
        if not word:
            continue
        word, rest = word.upper(), rest.strip()
        if word in _WITH_HEREDOC:
            at = _after_heredocs(lines, at, rest)
        if word == "FROM":
            stage, step = stage + 1, 0
        step += 1
        found.append(Instruction(word, rest, begun + 1, stage, step))
    if not stage:
        raise ImageError("the Dockerfile has no FROM", hint="the first instruction is FROM IMAGE")
    return tuple(found)


def _escape_character(lines: list[str]) -> str:
    for line in lines:
        match = _DIRECTIVE.match(line)
        if match is None:
            break
        if match[1].lower() == "escape" and match[2] in ("\\", "`"):
            return match[2]
    return "\\"


def _joined(lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """The instruction that begins at `at` on one line, and where the next begins; empty for a comment."""
    parts: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.lstrip().startswith("#") or (parts and not line.strip()):
            if parts:
                continue  # comments and empty lines within an instruction do not end it
            return "", at
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            parts.append(line)
            break
        parts.append(stripped[:-1])
    return re.sub(r"\s+", " ", "".join(parts)) if parts else "", at


def _after_heredocs(lines: list[str], at: int, rest: str) -> int:
    for match in _HEREDOC.finditer(rest):
        while at < len(lines):
            line = lines[at].lstrip("\t") if match[1] else lines[at]
            at += 1
            if line == match[3]:
                break
    return at


def images_of(instructions: tuple[Instruction, ...], args: Mapping[str, str]) -> tuple[str, ...]:
    """The images that the build takes from outside: FROM, COPY --from and RUN --mount from=, in their order.

    `args` are the build arguments given. Raises `ImageError` for a FROM of another platform, or one that needs an
    ARG which has no value.
    """
    heading: dict[str, str] = {}
    stages: set[str] = set()
    wanted: dict[str, None] = {}
    for one in instructions:
        if one.word == "ARG" and one.stage == 0:
            for name, value in _assignments(one.rest):
                heading[name] = args.get(name, expand(value, heading))
        elif one.word == "FROM":
            _read_from(one, heading, stages, wanted)
        elif one.word in ("COPY", "ADD", "RUN"):
            for source in _sources(one):
                name = expand(source, {**heading, **args})
                if name.lower() not in stages and not name.isdigit():
                    wanted[name] = None
    return tuple(wanted)


def _read_from(one: Instruction, known: Mapping[str, str], stages: set[str], wanted: dict[str, None]) -> None:
    words = one.rest.split(" ")
    while words and words[0].startswith("--"):
        flag = expand(words.pop(0), {**_platform_args(), **known})
        if flag.startswith("--platform=") and flag.partition("=")[2] not in _platforms():
            raise ImageError(
                f"line {one.line}: {one.text!r} asks for another platform than this host's",
                hint="leave --platform out, or build elsewhere",
                cause="wrong_architecture",
            )
    name = expand(words[0], known) if words else ""
    if not name:
        raise ImageError(
            f"line {one.line}: {one.text!r} names no image",
            hint="give the ARG a default, or pass it with --build-arg",
            cause="build_failed",
        )
    if name.lower() not in stages and name != "scratch":
        wanted[name] = None
    if len(words) >= 3 and words[1].lower() == "as":
        stages.add(words[2].lower())


def _platforms() -> tuple[str, ...]:
    from dayfly.images.sources import host_architecture

    own = host_architecture()
    return (f"linux/{own}", f"linux/{own}/v8" if own == "arm64" else f"linux/{own}", own)


def _platform_args() -> dict[str, str]:
    own = _platforms()[0]
    return {"BUILDPLATFORM": own, "TARGETPLATFORM": own}


def _sources(one: Instruction) -> list[str]:
    if one.word == "RUN":
        mounts = re.findall(r"--mount=(\S+)", one.rest)
        return [part[5:] for mount in mounts for part in mount.split(",") if part.startswith("from=")]
    return re.findall(r"--from=(\S+)", one.rest)


def _assignments(rest: str) -> list[tuple[str, str]]:
    """`A=1 B="two"` → pairs; a name alone has the empty value."""
    found = re.findall(r"""([A-Za-z_]\w*)(?:=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"']*))?""", rest)
    return [(name, value.strip("\"'")) for name, value in found]


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$A`, `${A}`, `${A:-default}`, `${A:+other}` as in a Dockerfile; quotes around the whole are dropped."""

    def value(match: re.Match[str]) -> str:
        if match[1] is not None:
            return match[1]
        name, rule, other = match[2] or match[3], match[4] or "", match[5] or ""
        there = name in values and (bool(values[name]) or not rule.startswith(":"))
        if rule.endswith("-"):
            return values[name] if there else expand(other, values)
        if rule.endswith("+"):
            return expand(other, values) if there else ""
        return values.get(name, "")

    return _VARIABLE.sub(value, text.strip("\"'"))


_STEP = re.compile(rb"^(?:\[(\d+)/\d+\] )?STEP (\d+)/\d+: ", re.MULTILINE)


def last_step(log: bytes) -> tuple[int | None, int] | None:
    """Stage and step of the last `STEP` line in a builder's output; the stage is None when there is only one."""
    steps = _STEP.findall(log)
    return (int(steps[-1][0]) if steps[-1][0] else None, int(steps[-1][1])) if steps else None


def instruction_at(
    instructions: tuple[Instruction, ...], at: tuple[int | None, int] | None, added: int = 0
) -> Instruction | None:
    """The instruction of a stage and step; `added`: steps that were put after each FROM by ourselves."""
    if at is None:
        return None
    stage = at[0] or max(i.stage for i in instructions)
    step = at[1] if at[1] == 1 else max(1, at[1] - added)
    return next((i for i in instructions if (i.stage, i.step) == (stage, step)), None)
