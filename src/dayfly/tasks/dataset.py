"""Data sets as a source of tasks: Harbor's `registry.json` and `dataset.toml`.

`registry.json#NAME@VERSION` names one data set of a registry; its tasks lie beside the file, or in git
repositories that are fetched by commit into the cache. `dataset.toml` lists tasks by name and digest; they lie
in folders beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dayfly.errors import HostError, NotFoundError, TaskError
from dayfly.evidence import sha256_file
from dayfly.process import run, which
from dayfly.tasks.files import read_task_files
from dayfly.tasks.schema import NAME_PATTERN

MAX_BYTES = 64 * 1024 * 1024
FETCH_TIMEOUT_S = 900.0
GIT_TIMEOUT_S = 120.0
_URL = re.compile(r"(?:https|file|ssh)://[^\s]+")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LFS = b"version https://git-lfs.github.com/spec/"


# --- what the files hold -------------------------------------------------------------------------


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\0" in value:
        raise ValueError("a path in a repository is relative, without `..`")
    return path.as_posix()


class RegistryTask(BaseModel):
    """A task of a registry: in a git repository, or beside the file."""

    model_config = ConfigDict(extra="ignore")
    name: str
    git_url: str | None = None
    git_commit_id: str | None = None
    path: str


class RegistryDataset(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    version: str
    tasks: list[RegistryTask]


Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class DatasetTask(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    digest: Digest


def _file_name(value: str) -> str:
    if "/" in value or "\\" in value or value in ("", ".", ".."):
        raise ValueError("a file of a data set lies beside dataset.toml")
    return value


class DatasetFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    path: Annotated[str, AfterValidator(_file_name)]
    digest: Digest | None = None


class DatasetHead(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: str | None = None


class DatasetToml(BaseModel):
    """dataset.toml."""

    model_config = ConfigDict(extra="ignore")
    dataset: DatasetHead
    tasks: list[DatasetTask] = []
    files: list[DatasetFile] = []

    @property
    def digest(self) -> str:
        """sha256:… over the tasks' digests and those of the files, as Harbor computes it."""
        text = ",".join(sorted(t.digest.removeprefix("sha256:") for t in self.tasks))
        if self.files:
            parts = sorted(f"{f.path}:{(f.digest or '').removeprefix('sha256:')}" for f in self.files)
            text += ";" + ",".join(parts)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# --- from a path to task folders -----------------------------------------------------------------


def split_dataset(path: Path) -> tuple[Path, str] | None:
    """The file, and which data set of it, when `path` names one; else None."""
    text = str(path)
    file, _, which_one = text.partition("#")
    if Path(file).name == "dataset.toml" and not which_one:
        return Path(file), ""
    if Path(file).suffix == ".json" and not Path(text).is_dir():
        return Path(file), which_one
    return None


def tasks_of_dataset(file: Path, which_one: str) -> list[Path]:
    """The task folders of a data set, each there and as its digest says.

    Raises `NotFoundError` for a file or data set that is not there, `TaskError` for a task that is not there or
    differs, and `HostError` when a repository cannot be fetched.
    """
    if file.name == "dataset.toml":
        return _of_dataset_toml(file)
    chosen = _choose(read_registry(file), which_one, file)
    return list(_of_registry(chosen, file))


def read_registry(file: Path) -> list[RegistryDataset]:
    """Raises `NotFoundError` or `TaskError`."""
    try:
        data = json.loads(_bytes(file))
    except (ValueError, RecursionError) as e:
        raise TaskError(f"{file} is not JSON: {e}", hint="mend it; a registry is a list of data sets") from e
    if not isinstance(data, list):
        raise TaskError(f"{file} is not a list of data sets", hint="see docs/datasets.md")
    return [_validated(RegistryDataset, entry, f"{file}: entry {n}") for n, entry in enumerate(data, 1)]


def read_dataset_toml(file: Path) -> DatasetToml:
    """Raises `NotFoundError` or `TaskError`."""
    try:
        data = tomllib.loads(_bytes(file).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise TaskError(f"{file} is not TOML: {e}", hint="mend the line named there") from e
    found: DatasetToml = _validated(DatasetToml, data, str(file))
    return found


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as e:
        raise NotFoundError(f"{file}: {e.strerror}", hint="give a registry.json or a dataset.toml") from e
    if len(data) > MAX_BYTES:
        raise TaskError(f"{file} is larger than {MAX_BYTES} bytes", hint="split it")
    return data


def _validated(model: type[Any], data: Any, where: str) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as e:
        one = e.errors(include_url=False)[0]
        key = ".".join(str(part) for part in one["loc"])
        raise TaskError(f"{where}: {key}: {one['msg']}", hint="see docs/datasets.md") from e


def _choose(datasets: list[RegistryDataset], which_one: str, file: Path) -> RegistryDataset:
    """By `NAME@VERSION`; without a version the newest, in Harbor's order; without a name the only one."""
    names = sorted({d.name for d in datasets})
    name, _, version = which_one.partition("@")
    if not name:
        if len(names) != 1:
            raise NotFoundError(
                f"{file} holds {len(names)} data sets",
                hint=f"write {file}#NAME@VERSION; there are {', '.join(names[:10])}",
            )
        name = names[0]
    of_name = [d for d in datasets if d.name == name]
    if not of_name:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names[:10])}"
        raise NotFoundError(f"{file} holds no data set called {name!r}", hint=hint)
    versions = {d.version: d for d in of_name}
    wanted = version or max(versions, key=_version_key)
    if wanted not in versions:
        raise NotFoundError(
            f"{file}: {name} has no version {wanted!r}", hint=f"there are {', '.join(sorted(versions))}"
        )
    return versions[wanted]


def _version_key(version: str) -> tuple[bool, bool, tuple[int, ...], bool, str]:
    """`head` first, then numbers by their parts (a release after its candidates), then words."""
    found = re.match(r"v?(\d+(?:\.\d+)*)(.*)$", version)
    numbers = tuple(int(n) for n in found[1].split(".")) if found else ()
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return version == "head", found is not None, numbers, found is not None and not found[2], version


# --- tasks beside the file -----------------------------------------------------------------------


def _of_dataset_toml(file: Path) -> list[Path]:
    dataset = read_dataset_toml(file)
    for entry in dataset.files:
        place = file.parent / entry.path
        if entry.digest is not None and (not place.is_file() or sha256_file(place) != entry.digest):
            raise TaskError(
                f"{place} is not the file that {file} lists as {entry.digest[:19]}…", hint="fetch the data set anew"
            )
    by_digest: dict[str, Path] = {}
    by_name: dict[str, Path] = {}
    for folder in _folders_beside(file):
        by_digest[read_task_files(folder).digest] = folder
        by_name[_name_of(folder)] = by_name[folder.name] = folder
    return [_listed(task, by_digest, by_name, file) for task in dataset.tasks]


def _folders_beside(file: Path) -> list[Path]:
    found = [p.parent for pattern in ("*/task.toml", "*/*/task.toml") for p in file.parent.glob(pattern)]
    return sorted(set(found))


def _name_of(folder: Path) -> str:
    try:
        data = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        return str(data["task"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def _listed(task: DatasetTask, by_digest: dict[str, Path], by_name: dict[str, Path], file: Path) -> Path:
    if task.digest in by_digest:
        return by_digest[task.digest]
    other = by_name.get(task.name) or by_name.get(task.name.split("/")[1])
    if other is not None:
        raise TaskError(
            f"{other} has the digest {read_task_files(other).digest[:19]}…, but {file} lists {task.digest[:19]}…",
            hint="fetch the version that the data set means, or name the folder itself",
        )
    raise TaskError(
        f"{task.name} of {file} is in no folder beside it",
        hint="this version fetches no packages; put the task's folder there",
    )


def _of_registry(dataset: RegistryDataset, file: Path) -> Iterator[Path]:
    """In the order of the registry; the tasks of one commit are checked out together."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for task in dataset.tasks:
        if task.git_url is not None:
            place = _validated_path(task, file)
            wanted.setdefault((task.git_url, task.git_commit_id or ""), []).append(place)
    fetched = {(url, at, p): f for (url, at), ps in wanted.items() for p, f in fetch_paths(url, at, ps).items()}
    for task in dataset.tasks:
        if task.git_url is not None:
            folder = fetched[task.git_url, task.git_commit_id or "", _validated_path(task, file)]
        else:
            folder = file.parent / Path(task.path).expanduser()
        if not (folder / "task.toml").is_file():
            raise TaskError(
                f"{task.name} of {dataset.name}: {folder} holds no task", hint="see the registry's path"
            )
        yield folder


def _validated_path(task: RegistryTask, file: Path) -> str:
    try:
        return _relative(task.path)
    except ValueError as e:
        raise TaskError(f"{file}: task {task.name}: path {task.path!r}: {e}", hint="mend the registry") from e


# --- git repositories ----------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where fetched tasks lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dayfly" / "tasks"


def fetch_paths(url: str, commit: str, paths: list[str]) -> dict[str, Path]:
    """Folders of a repository at a commit, path → folder in the cache; what is there is not fetched again.

    No hook, filter or submodule of the repository has a part in it. Raises `TaskError` or `HostError`.
    """
    if _URL.fullmatch(url) is None:
        raise TaskError(f"git_url {url!r} is not an https://, ssh:// or file:// address", hint="mend the registry")
    place = cache_dir() / hashlib.sha256(url.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    git = str(which("git", "install the package git: tasks of a registry come from repositories"))
    with _locked(place / "lock"):
        resolved = commit if _COMMIT.fullmatch(commit) else _resolve(git, url, commit or "HEAD")
        folders = {path: place / resolved / hashlib.sha256(path.encode()).hexdigest()[:16] for path in paths}
        missing = [path for path, folder in folders.items() if not folder.is_dir()]
        if missing:
            _fetch(git, place / "git", url, resolved)
            for path in missing:
                _check_out(git, place, resolved, path, folders[path])
    return {path: folder / (PurePosixPath(path).name or "task") for path, folder in folders.items()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _git(
    git: str, *words: str | Path, timeout_s: float = GIT_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> bytes:
    settings = (
        "core.hooksPath=/dev/null",
        "core.fsmonitor=false",
        "submodule.recurse=false",
        "fetch.recurseSubmodules=false",
        "filter.lfs.smudge=",
        "filter.lfs.process=",
        "filter.lfs.required=false",
        "gc.auto=0",
    )
    options = [word for setting in settings for word in ("-c", setting)]
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        **(env or {}),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "LC_ALL": "C",
    }
    return run([git, *options, *words], timeout_s=timeout_s, env=env).stdout


def _resolve(git: str, url: str, name: str) -> str:
    """The commit that a branch or tag means now."""
    if not re.fullmatch(r"[A-Za-z0-9][\w./+-]*", name):
        raise TaskError(f"git_commit_id {name!r} is no name of a commit", hint="mend the registry")
    try:
        lines = _git(git, "ls-remote", "--", url, name, f"{name}^{{}}").decode().splitlines()
    except HostError as e:
        raise _unreachable(url, e) from e
    found = {line.split("\t")[1]: line.split("\t")[0] for line in lines}
    for ref in (f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}", name):
        if ref in found:
            return found[ref]
    raise TaskError(f"{url} has no branch or tag {name!r}", hint="write a whole commit id")


def _unreachable(url: str, error: HostError) -> HostError:
    return HostError(
        f"the repository {url} could not be read: {error.message}",
        hint=error.hint or "check the address and your access to it",
        cause="git_fetch",
    )


def _fetch(git: str, repository: Path, url: str, commit: str) -> None:
    if not repository.is_dir():
        _git(git, "init", "-q", "--bare", repository)
    if _has(git, repository, commit):
        return
    into = ("--git-dir", repository, "fetch", "-q", "--no-tags", "--no-write-fetch-head")
    try:
        _git(git, *into, "--depth=1", "--", url, commit, timeout_s=FETCH_TIMEOUT_S)
    except HostError:  # a server that hands out branches only
        try:
            _git(git, *into, "--", url, "+refs/*:refs/fetched/*", timeout_s=FETCH_TIMEOUT_S)
        except HostError as e:
            raise _unreachable(url, e) from e
    if not _has(git, repository, commit):
        raise TaskError(f"{url} has no commit {commit}", hint="the registry may be older than the repository")


def _has(git: str, repository: Path, commit: str) -> bool:
    try:
        _git(git, "--git-dir", repository, "cat-file", "-e", f"{commit}^{{commit}}")
    except HostError:
        return False
    return True


def _check_out(git: str, place: Path, commit: str, path: str, dest: Path) -> None:
    """The files of one path into `dest`/NAME, whole or not at all."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=place))
    try:
        tree, index = making / "tree", making / "index"
        tree.mkdir()
        here = ("--git-dir", place / "git", "--work-tree", tree)
        # An index of its own, and a path that is no pattern.
        own = {"GIT_INDEX_FILE": str(index), "GIT_LITERAL_PATHSPECS": "1"}
        try:
            _git(git, *here, "checkout", "-q", commit, "--", path, env=own)
        except HostError as e:
            raise TaskError(f"commit {commit[:12]} has no folder {path}", hint="mend the registry's path") from e
        source = tree / path if path != "." else tree
        if not source.is_dir():
            raise TaskError(f"commit {commit[:12]} has no folder {path}", hint="mend the registry's path")
        _refuse_pointers(source, path)
        (making / "done").mkdir()
        source.rename(making / "done" / (PurePosixPath(path).name or "task"))
        (making / "done").rename(dest)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _refuse_pointers(folder: Path, path: str) -> None:
    """Large files can be kept elsewhere, with a pointer in their place; a task would be made of pointers."""
    for file in folder.rglob("*"):
        if file.is_symlink() or not file.is_file() or file.stat().st_size > 1024:
            continue
        if file.read_bytes().startswith(_LFS):
            raise TaskError(
                f"{path}/{file.relative_to(folder)} is kept in Git LFS, which is not fetched",
                hint="clone the repository with git lfs and name the task's folder",
            )
