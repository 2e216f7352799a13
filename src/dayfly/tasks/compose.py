"""`environment/docker-compose.yaml` of a task: its service `main`, as the Compose specification means it.

A VM is one machine, so a file that describes `main` alone can be carried over; anything else is refused by
the name of its key, never ignored. What Compose would do with the key is the measure: a value is either
honoured, or without meaning for a VM (a container's name), or an error.
"""

from __future__ import annotations

import re
import reprlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dayfly.errors import TaskError
from dayfly.model import Healthcheck, Task

COMPOSE_NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
MAX_BYTES = 256 * 1024

HARBOR_VALUES: Mapping[str, str] = {
    "TEST_DIR": "/tests",
    "ENV_VERIFIER_LOGS_PATH": "/logs/verifier",
    "ENV_AGENT_LOGS_PATH": "/logs/agent",
    "ENV_ARTIFACTS_PATH": "/logs/artifacts",
}
"""Variables that Harbor gives to Compose and that name places in the environment."""

_OWN_IMAGE = {"${MAIN_IMAGE_NAME}", "${PREBUILT_IMAGE_NAME}"}
_OWN_CONTEXT = {"${CONTEXT_DIR}", ".", "./"}
_OWN_SIZE = {"${CPUS}", "${MEMORY}"}
_USUAL_NETWORK = {"bridge", "${NETWORK_MODE:-bridge}"}
"""Compose's own default, as many task sets write it out: it asks for no more than a file that says nothing."""
_LOG_MOUNTS = {
    f"${{HOST_{name}_PATH}}:{target}"
    for name in ("VERIFIER_LOGS", "AGENT_LOGS", "ARTIFACTS")
    for target in (f"${{ENV_{name}_PATH}}", HARBOR_VALUES[f"ENV_{name}_PATH"])
}
_NO_MEANING = {
    *("container_name", "expose", "init", "labels", "logging", "pull_policy", "restart", "stdin_open"),
    *("stop_grace_period", "tty"),
}
"""Keys that change nothing of what a task sees in a VM."""
_IDLE = {("sleep", "infinity"), ("tail", "-f", "/dev/null"), ("cat",)}
"""Commands that only keep a container alive. Harbor never runs an image's own command."""
_SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}


@dataclass(frozen=True)
class ComposeMain:
    """The service `main`. None or empty: as the task or its image says."""

    path: Path
    image: str | None = None
    build: Path | None = None
    """The Dockerfile to build; its folder is the context."""
    env: dict[str, str] = field(default_factory=dict)
    """Values may be templates (`${VAR}`, whole) that the host fills when a rollout runs; see `tasks.env`."""
    workdir: str | None = None
    user: str | None = None
    healthcheck: Healthcheck | None = None


def find_compose(environment: Path) -> Path | None:
    """The Compose file of a task's environment/ folder, if there is one."""
    return next((environment / n for n in COMPOSE_NAMES if (environment / n).is_file()), None)


def read_compose(path: Path) -> ComposeMain:
    """Read a task's Compose file. Raises `TaskError` that names file and key for whatever cannot be carried."""
    services = _services(path)
    others = [name for name in services if name != "main"]
    if others:
        raise _refused(
            path,
            ", ".join(f"services.{name}" for name in others),
            "this version runs the service `main` only",
            "leave this task to a host with Docker, or start the service from the image of `main`",
        )
    if "main" not in services:
        return ComposeMain(path)
    main = _table(services["main"], path, "services.main")
    reader = _Reader(path)
    for key, value in main.items():
        reader.read(key, value)
    return reader.result(main)


def with_compose(task: Task, compose: ComposeMain) -> Task:
    """The task as its Compose file completes it; what task.toml says wins, as in Harbor.

    Raises `TaskError` where both name different images or health checks.
    """
    named = {name for name in (task.image, compose.image) if name is not None}
    if len(named) > 1 or (task.image is not None and compose.build is not None):
        raise TaskError(
            f"{compose.path}: services.main names another image than environment.docker_image = {task.image!r}",
            hint="name the image in one place",
        )
    if task.healthcheck is not None and compose.healthcheck is not None:
        raise TaskError(
            f"{compose.path}: services.main.healthcheck and [environment.healthcheck] are both there",
            hint="keep one of them",
        )
    image = task.image or compose.image
    return task.model_copy(
        update={
            "image": image,
            "dockerfile": None if image is not None else compose.build or task.dockerfile,
            "env": {**compose.env, **task.env},
            "workdir": task.workdir or compose.workdir,
            "agent_user": task.agent_user or compose.user,
            "verifier_user": task.verifier_user or compose.user,
            "healthcheck": task.healthcheck or compose.healthcheck,
        }
    )


# --- the file ------------------------------------------------------------------------------------


def load_compose_yaml(path: Path) -> dict[str, Any]:
    """The file as data, by YAML 1.2's rules as Compose reads it (`yes` is a word, `12:30` no number)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise TaskError(f"{path}: {e.strerror}") from e
    if len(data) > MAX_BYTES:
        raise TaskError(f"{path} is larger than {MAX_BYTES} bytes", hint="a Compose file is small")
    try:
        found = yaml.load(data, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise TaskError(f"{path} is not YAML: {e}", hint="mend the line named there") from e
    return _table(found, path, "the file")


def _services(path: Path) -> dict[str, Any]:
    data = load_compose_yaml(path)
    for key, value in data.items():
        if key in ("services", "version", "name") or key.startswith("x-") or not value:
            continue
        raise _refused(path, key, "a VM has no such thing", "leave it out")
    return _table(data.get("services") or {}, path, "services")


def _table(value: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TaskError(f"{path}: {where} is not a table of named values", hint="see the Compose specification")
    return value


def _refused(path: Path, key: str, why: str, hint: str) -> TaskError:
    return TaskError(f"{path}: {key}: {why}", hint=f"{hint}, or skip this task", cause="unsupported")


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, in which `no`, `12:30` and `2024-01-01` are not texts; Compose follows 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != "<<"]
        twice = next((k for n, k in enumerate(keys) if k in keys[:n]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
# A leading zero makes no octal number: Compose hands such a value over as it is written.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


# --- the service ---------------------------------------------------------------------------------


class _Reader:
    """Takes the keys of `services.main` one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def result(self, main: Mapping[str, Any]) -> ComposeMain:
        if self.found.get("build") is not None and main.get("image") not in _OWN_IMAGE:
            self.found.pop("image", None)  # beside `build`, `image` only names what is built
        return ComposeMain(self.path, **self.found)

    def read(self, key: str, value: Any) -> None:
        if value in (None, [], {}) or key in _NO_MEANING or key.startswith("x-"):
            return
        read = {
            "image": self._image,
            "build": self._build,
            "command": self._command,
            "environment": self._environment,
            "working_dir": self._workdir,
            "user": self._user,
            "healthcheck": self._healthcheck,
            "volumes": self._volumes,
            "platform": self._platform,
            "network_mode": self._network,
            "cpus": self._size,
            "mem_limit": self._size,
            "deploy": self._deploy,
        }.get(key)
        if read is None:
            raise self._refuse(key, "not carried over to a VM", _suggestion(key))
        read(key, value)

    def _refuse(self, key: str, why: str, hint: str = "leave it out") -> TaskError:
        return _refused(self.path, f"services.main.{key}", why, hint)

    def _wrong(self, key: str, why: str, hint: str | None = None) -> TaskError:
        return TaskError(f"{self.path}: services.main.{key}: {why}", hint=hint or "see the Compose specification")

    def _text(self, key: str, value: Any) -> str:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise self._wrong(key, f"{_shown(value)} is no text")
        try:
            return interpolate(str(value), HARBOR_VALUES)
        except ValueError as e:
            raise self._refuse(key, str(e), "write the value itself") from e

    def _image(self, key: str, value: Any) -> None:
        if value not in _OWN_IMAGE:
            self.found["image"] = self._text(key, value)

    def _build(self, key: str, value: Any) -> None:
        table = {"context": value} if isinstance(value, str) else _table(value, self.path, "services.main.build")
        for name in table:
            if name not in ("context", "dockerfile", "pull", "no_cache"):
                raise self._refuse(f"build.{name}", "not given to the build", "write it into the Dockerfile")
        context, name = str(table.get("context", ".")), str(table.get("dockerfile", "Dockerfile"))
        folder = PurePosixPath("." if context in _OWN_CONTEXT else self._text("build.context", context))
        if folder.is_absolute() or ".." in folder.parts or ":" in context.replace("${CONTEXT_DIR}", ""):
            raise self._refuse("build.context", f"{context!r} lies outside of environment/", "move it inside")
        if len(PurePosixPath(name).parts) != 1 or "$" in name:
            raise self._refuse("build.dockerfile", f"{name!r} is not a file in the context itself", "move it there")
        if context in _OWN_CONTEXT and name == "Dockerfile":
            return  # environment/Dockerfile, which is the task's image anyway
        dockerfile = self.path.parent / folder / name
        if not dockerfile.is_file():
            raise self._wrong("build", f"{dockerfile} does not exist")
        self.found["build"] = dockerfile

    def _command(self, key: str, value: Any) -> None:
        words = split_command(value)
        if words is None:
            raise self._wrong(key, f"{_shown(value)} is neither a text nor a list of texts")
        if not is_idle(words):
            raise self._refuse(
                key,
                f"{_shown(shlex.join(words))} would not be started: the agent has `main` to itself",
                "start it from the health check or from environment/setup.sh",
            )

    def _environment(self, key: str, value: Any) -> None:
        self.found["env"] = {name: self._variable(name, text) for name, text in self._pairs(key, value)}

    def _pairs(self, key: str, value: Any) -> list[tuple[str, str | None]]:
        if isinstance(value, list):
            lines = [self._line(key, line) for line in value]
            return [(name, text if equals else None) for name, equals, text in lines]
        table = _table(value, self.path, f"services.main.{key}")
        try:
            return [(name, _plain(text)) for name, text in table.items()]
        except ValueError as e:
            raise self._wrong(key, str(e)) from e

    def _line(self, key: str, line: Any) -> tuple[str, str, str]:
        if not isinstance(line, str) or line.startswith("="):
            raise self._wrong(key, f"{_shown(line)} is not NAME=VALUE")
        return line.partition("=")

    def _variable(self, name: str, text: str | None) -> str:
        """A value; a whole-value template stays one, because the host's variables are read when a rollout runs."""
        if text is None:
            return f"${{{name}}}"
        whole = re.fullmatch(r"\$(?:(\w+)|\{(\w+)(:-[^}]*)?\})", text)
        if whole is not None and (whole[1] or whole[2]) not in HARBOR_VALUES:
            return f"${{{whole[1] or whole[2]}{whole[3] or ''}}}"
        value = self._text(f"environment.{name}", text)
        if value.startswith("${") and value.endswith("}"):
            raise self._refuse(f"environment.{name}", "a value that looks like a template cannot be handed over")
        return value

    def _workdir(self, key: str, value: Any) -> None:
        workdir = self._text(key, value)
        if not workdir.startswith("/"):
            raise self._wrong(key, f"{workdir!r} is not an absolute path")
        self.found["workdir"] = workdir

    def _user(self, key: str, value: Any) -> None:
        self.found["user"] = self._text(key, value)

    def _healthcheck(self, key: str, value: Any) -> None:
        table = _table(value, self.path, "services.main.healthcheck")
        try:
            self.found["healthcheck"] = parse_healthcheck(table)
        except ValueError as e:
            raise self._wrong(key, str(e)) from e

    def _volumes(self, key: str, value: Any) -> None:
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str) or entry.removesuffix(":rw") not in _LOG_MOUNTS:
                raise self._refuse(
                    key, f"{_shown(entry)}: a VM shares no folder with its host", "copy it into the image"
                )

    def _platform(self, key: str, value: Any) -> None:
        if self._text(key, value).removeprefix("linux/") not in ("amd64", "x86_64", "linux"):
            raise self._refuse(key, f"{_shown(value)} is not the platform of these VMs, linux/amd64")

    def _network(self, key: str, value: Any) -> None:
        if self._text(key, value) not in ("none", *_USUAL_NETWORK):
            raise self._refuse(
                key, f"{_shown(value)}: a VM has no network of that kind", "leave it out or write none"
            )

    def _size(self, key: str, value: Any) -> None:
        if value not in _OWN_SIZE:
            raise self._refuse(key, "sizes are read from task.toml only", "write [environment] cpus, memory_mb")

    def _deploy(self, key: str, value: Any) -> None:
        """`deploy.resources.limits` with Harbor's own placeholders; whatever else is in there is refused."""
        for name, inner in _flat(value, key):
            known = (f"{key}.resources.limits.cpus", f"{key}.resources.limits.memory")
            if name not in known:
                raise self._refuse(name, "not carried over to a VM")
            self._size(name, inner)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf; one at a time, because aliases can make a small file a huge tree."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}")


def _shown(value: Any) -> str:
    """A value for a message, bounded in length whatever it is."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 2, 120, 120


def _suggestion(key: str) -> str:
    known = ["image", "build", "command", "environment", "working_dir", "user", "healthcheck"]
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else "leave it out"


def _plain(value: Any) -> str | None:
    """A scalar of an `environment` table as Compose hands it over; None asks for the host's variable.

    Raises `ValueError` for what is no scalar.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{_shown(value)} is no text")
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- values of the specification -----------------------------------------------------------------

_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(?:(:?[-?+])([^}]*))?\}|)")


def interpolate(text: str, values: Mapping[str, str]) -> str:
    """Fill `$NAME`, `${NAME}`, `${NAME:-default}` and the like; `$$` is a dollar sign.

    Raises `ValueError` for a variable that is not in `values` and has no default.
    """

    def fill(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        name, operator, other = found[2] or found[3], found[4] or "", found[5] or ""
        if name is None:
            raise ValueError(f"{text!r} has a `$` that begins no variable; write `$$` for a dollar sign")
        value = values.get(name)
        missing = value is None or (operator.startswith(":") and not value)
        if operator.endswith("+"):
            return "" if missing else other
        if missing and operator.endswith("-"):
            return other
        if missing or value is None:
            raise ValueError(f"the variable {name} in {text!r} is not known here")
        return value

    return _VARIABLE.sub(fill, text)


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")


def parse_compose_duration(text: Any) -> float:
    """`1m30s`, `1.5s`, `500ms` → seconds. Raises `ValueError`, also for a number without a unit."""
    if text in ("0", 0):
        return 0.0
    parts = list(_PART.finditer(text)) if isinstance(text, str) else []
    if not parts or "".join(p[0] for p in parts) != text:
        raise ValueError(f"{_shown(text)} is not a duration such as 90s, 1m30s or 1.5s")
    return sum(float(p[1]) * _UNITS[p[2]] for p in parts)


def split_command(value: Any) -> tuple[str, ...] | None:
    """A `command` as words: a text is split as a shell would, but by no shell. None for what is no command."""
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError:
            return None
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    return None


def is_idle(words: tuple[str, ...]) -> bool:
    """Whether a command only keeps a container alive: `sleep infinity`, also within `sh -c`."""
    if len(words) == 3 and words[0] in _SHELLS and words[1] in ("-c", "-lc"):
        words = split_command(words[2]) or words
    return not words or words in _IDLE or words in {(shell,) for shell in _SHELLS}


def parse_healthcheck(table: Mapping[str, Any]) -> Healthcheck | None:
    """A `healthcheck` with Docker's defaults; None when it is switched off. Raises `ValueError` naming the key."""
    known = ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable")
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            raise ValueError(f"unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
    if table.get("disable") is True:
        return None
    command = _test(table.get("test"))
    if command is None:
        return None
    retries = table.get("retries", 3)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries: {_shown(retries)} is not a whole number")
    seconds = {
        key: _seconds(table, key, default)
        for key, default in (("interval", 30.0), ("timeout", 30.0), ("start_period", 0.0), ("start_interval", 5.0))
    }
    return Healthcheck(
        command=command, retries=retries or 3, **{f"{key}_s": value for key, value in seconds.items()}
    )


def _seconds(table: Mapping[str, Any], key: str, default: float) -> float:
    """A duration; 0 means the default, as in Docker."""
    if table.get(key) is None:
        return default
    try:
        return parse_compose_duration(table[key]) or default
    except ValueError as e:
        raise ValueError(f"{key}: {e}") from e


def _test(test: Any) -> str | None:
    """The probe as a shell command; None for `NONE`. `$$` is a dollar sign."""
    if isinstance(test, str) and test:
        return interpolate(test, HARBOR_VALUES)
    words = split_command(test) if isinstance(test, list) else None
    if not words:
        raise ValueError(f"test: {_shown(test)} is neither a command line nor a list of texts")
    kind, *rest = (interpolate(word, HARBOR_VALUES) for word in words)
    if kind == "NONE":
        return None
    if kind == "CMD" and rest:
        return shlex.join(rest)
    if kind == "CMD-SHELL" and len(rest) == 1:
        return rest[0]
    raise ValueError(f"test: a list is [CMD, program, ...], [CMD-SHELL, line] or [NONE], not {_shown(test)}")
