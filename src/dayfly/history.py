"""What a repository in a task's image gives away: objects that are not in the history of what is checked out.

An agent can read the fixing commit there: by a tag or branch, in the reflog, or among objects that nothing
reaches any more. The base is HEAD as it is checked out in the image. Git of the image is used where there is
one; else the objects are fetched, and the host's git reads them in a sandbox. Either way only plumbing runs,
without hooks, replacements, grafts or anything that a repository's configuration could start.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dayfly.errors import ConfigError, GuestRefused, HostError
from dayfly.model import Task
from dayfly.process import run_async, which
from dayfly.protocols import AgentResult, PathLike, Record, TransferLimits, Vm

RESULT_NAME = "agent/history.json"
MAX_REPOSITORIES = 200
MAX_NAMED = 20
MAX_OUTPUT = 16 * 1024 * 1024
MAX_FETCHED = TransferLimits(files=100_000, bytes=1024**3)
GIT_TIMEOUT_S = 300.0

ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_REPLACE_OBJECTS": "1",  # a replacement or a graft can make the fix look like an ancestor
    "GIT_GRAFT_FILE": "/dev/null",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.commitGraph=false")

Git = Callable[[Sequence[str], bytes], Awaitable["Answer"]]
"""Runs git on one repository: arguments, standard input → answer."""


@dataclass(frozen=True)
class Answer:
    code: int
    out: bytes

    @property
    def lines(self) -> list[str]:
        return self.out.decode("utf-8", "replace").splitlines()


@dataclass(frozen=True)
class Extra:
    """An object that is not in the history of HEAD."""

    repository: str
    object: str
    kind: str
    subject: str
    where: str
    """`refs/…` names, `the reflog`, or `no reference`."""

    def __str__(self) -> str:
        subject = f" {self.subject!r}" if self.subject else ""
        return f"{self.repository}: {self.kind} {self.object[:12]}{subject}, reached by {self.where}"


class NotRead(Exception):
    """A repository could not be read; says why."""


async def find_extras(git: Git, repository: str) -> list[Extra]:
    """Every commit of a repository that is no ancestor of HEAD, then loose files and trees of no such commit.

    Raises `NotRead`.
    """
    head = await git(("rev-parse", "--verify", "--quiet", "HEAD^{commit}"), b"")
    base = ("--not", head.lines[0]) if head.code == 0 else ()
    listed = await _read(git, "rev-list", "--all", "--reflog", *base)
    # fsck says by its status that it found something; what it printed is the answer.
    checked = await git(("fsck", "--unreachable", "--no-reflogs", "--connectivity-only", "--no-progress"), b"")
    lost = [words[1:3] for words in map(str.split, checked.lines) if words[:1] == ["unreachable"]]
    commits = dict.fromkeys([*listed, *(oid for kind, oid in lost if kind == "commit")])
    logged = set(await _read(git, "rev-list", "--reflog", *base))
    found = [await _commit(git, repository, oid, logged) for oid in list(commits)[:MAX_NAMED]]
    found += [Extra(repository, oid, "commit", "", "?") for oid in list(commits)[MAX_NAMED:]]
    rest = [(kind, oid) for kind, oid in lost if kind in ("blob", "tree")]
    if rest and commits:
        wanted = "\n".join([*commits, *([f"^{base[1]}"] if base else []), ""]).encode()
        of_commits = await git(("rev-list", "--objects", "--no-object-names", "--stdin"), wanted)
        known = set(of_commits.lines)
        rest = [(kind, oid) for kind, oid in rest if oid not in known]
    return found + [Extra(repository, oid, kind, "", "no reference") for kind, oid in rest]


async def _read(git: Git, *arguments: str) -> list[str]:
    answer = await git(arguments, b"")
    if answer.code != 0:
        raise NotRead(f"git {arguments[0]} ended with status {answer.code}")
    return answer.lines


async def _commit(git: Git, repository: str, oid: str, logged: set[str]) -> Extra:
    text = await git(("cat-file", "commit", oid), b"")
    message = text.out.decode("utf-8", "replace").partition("\n\n")[2]
    refs = await git(("for-each-ref", "--count=3", f"--contains={oid}", "--format=%(refname)"), b"")
    where = ", ".join(refs.lines) or ("the reflog" if oid in logged else "no reference")
    return Extra(repository, oid, "commit", message.split("\n", 1)[0][:100], where)


# --- two ways to run git -------------------------------------------------------------------------


def guest_git(vm: Vm, repository: str) -> Git:
    """Git of the image, in its VM."""

    async def git(arguments: Sequence[str], stdin: bytes) -> Answer:
        kept = bytearray()

        def keep(chunk: bytes) -> None:
            kept.extend(chunk[: MAX_OUTPUT + 1 - len(kept)])

        argv = ("git", *SAFE, f"--git-dir={repository}", *arguments)
        result = await vm.exec(
            argv, env=ENV, cwd="/", user="root", stdin=stdin, timeout_s=GIT_TIMEOUT_S, stdout=keep
        )
        if len(kept) > MAX_OUTPUT or result.timed_out:
            raise NotRead(f"git {arguments[0]} printed or worked too long")
        return Answer(255 if result.exit_code is None else result.exit_code, bytes(kept))

    return git


def host_git(folder: Path) -> Git:
    """Git of the host on a repository's files from elsewhere; it sees nothing else of the host."""
    install = "install git and bubblewrap, or put git into the task's image"
    prlimit, bwrap, program = (str(which(name, install)) for name in ("prlimit", "bwrap", "git"))
    sandbox = [prlimit, f"--as={2 * 1024**3}", f"--cpu={int(GIT_TIMEOUT_S)}", f"--fsize={MAX_OUTPUT + 1}", bwrap]
    sandbox += ["--unshare-all"]
    sandbox += ["--die-with-parent", "--clearenv", "--ro-bind", "/usr", "/usr", "--dev", "/dev", "--proc", "/proc"]
    for name in ("/bin", "/lib", "/lib64"):
        place = Path(name)
        if place.is_symlink():
            sandbox += ["--symlink", str(place.readlink()), name]
        elif place.is_dir():
            sandbox += ["--ro-bind", name, name]
    for name, value in ENV.items():
        sandbox += ["--setenv", name, value]
    sandbox += ["--ro-bind", str(folder.resolve()), "/repository", "--chdir", "/repository", "--", program]

    async def git(arguments: Sequence[str], stdin: bytes) -> Answer:
        argv = [*sandbox, *SAFE, "--git-dir=/repository", *arguments]
        with tempfile.TemporaryFile() as out:  # a file, because prlimit bounds what is written to one
            done = await run_async(argv, input=stdin, timeout_s=GIT_TIMEOUT_S, check=False, stdout=out)
            out.seek(0)
            printed = out.read(MAX_OUTPUT + 1)
        if len(printed) > MAX_OUTPUT:
            raise NotRead(f"git {arguments[0]} printed too much")
        return Answer(done.returncode, printed)

    return git


NOT_FETCHED = ("config", "config.worktree", "hooks", "info", "modules", "lfs", "objects/info")
"""What a repository brings along that could make git do something, or point elsewhere."""
PLAIN_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n"


async def fetch_repository(vm: Vm, repository: str, folder: Path) -> Git:
    """Copy a repository's objects and references out of a VM; returns the host's git for them."""

    def exclude(name: str) -> bool:
        return any(name.rstrip("/") == n or name.startswith(n + "/") for n in NOT_FETCHED)

    folder.mkdir(parents=True, exist_ok=True)
    await vm.get(repository, folder, exclude=exclude, limits=MAX_FETCHED)
    (folder / "config").write_text(PLAIN_CONFIG)
    return host_git(folder)


# --- in the image of a task ----------------------------------------------------------------------

FIND = (
    *("find", "/", "(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/dev", ")", "-prune", "-o"),
    *("-type", "f", "-name", "HEAD", "-print0"),
)


class HistoryScan:
    """An agent that only looks: what it found is `agent/history.json` in the rollout's folder."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> HistoryScan:
        if options:
            raise ConfigError("the history scan has no options", hint="leave them out")
        return cls()

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """See `protocols.Agent`."""
        found = Findings()
        try:
            for repository in await _repositories(vm, found):
                await _look(vm, repository, found)
        finally:
            record.write(RESULT_NAME, found.to_json())
        return AgentResult(exit_code=0)


class Findings:
    """Of all repositories of an image."""

    def __init__(self) -> None:
        self.extras: list[Extra] = []
        self.unread: list[str] = []

    def to_json(self) -> bytes:
        shown = {"extras": [asdict(e) for e in self.extras], "unread": self.unread}
        return json.dumps(shown, indent=1).encode()


async def _repositories(vm: Vm, found: Findings) -> list[str]:
    """Folders that hold HEAD and objects/, so that bare repositories and those of submodules are among them."""
    kept = bytearray()

    def keep(chunk: bytes) -> None:
        kept.extend(chunk[: MAX_OUTPUT - len(kept)])

    try:
        await vm.exec(FIND, cwd="/", user="root", timeout_s=GIT_TIMEOUT_S, stdout=keep)
    except GuestRefused:
        found.unread.append("no program `find` in the image: repositories were not looked for")
        return []
    folders = [name.removesuffix(b"/HEAD") for name in bytes(kept).split(b"\0") if name]
    known = await _with_objects(vm, folders)
    if len(known) > MAX_REPOSITORIES:
        found.unread.append(f"only {MAX_REPOSITORIES} of {len(known)} repositories were looked at")
    return known[:MAX_REPOSITORIES]


async def _with_objects(vm: Vm, folders: list[bytes]) -> list[str]:
    """Those with a folder objects/ in them; a HEAD alone is a log, or another program's file."""
    known: list[str] = []
    for start in range(0, len(folders), 200):
        places = [folder + b"/objects" for folder in folders[start : start + 200]]
        argv: tuple[PathLike, ...] = ("find", *places, "-maxdepth", "0", "-type", "d", "-print0")
        result = await vm.exec(argv, cwd="/", user="root", timeout_s=GIT_TIMEOUT_S)
        names = result.stdout.head.split(b"\0")
        known += [n.removesuffix(b"/objects").decode("utf-8", "surrogateescape") for n in names if n]
    return known


async def _look(vm: Vm, repository: str, found: Findings) -> None:
    try:
        found.extras += await _extras(vm, repository)
    except (NotRead, GuestRefused, HostError) as error:
        found.unread.append(f"{repository} was not looked at: {getattr(error, 'message', error)}")


async def _extras(vm: Vm, repository: str) -> list[Extra]:
    try:
        return await find_extras(guest_git(vm, repository), repository)
    except GuestRefused:  # no git in the image
        with tempfile.TemporaryDirectory(prefix="dayfly-history-") as folder:
            git = await fetch_repository(vm, repository, Path(folder) / "repository")
            return await find_extras(git, repository)


def problems_in(data: bytes) -> tuple[list[str], list[str]]:
    """`agent/history.json` → sentences for a task's problems, and its remarks."""
    found = json.loads(data)
    extras = [Extra(**e) for e in found["extras"]]
    problems = [f"a repository holds what is not in its history: {e}" for e in extras[:MAX_NAMED]]
    if len(extras) > MAX_NAMED:
        problems.append(f"and {len(extras) - MAX_NAMED} more such objects; see {RESULT_NAME} of the rollout")
    return problems, list(found["unread"])
