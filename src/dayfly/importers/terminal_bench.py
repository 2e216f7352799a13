"""Terminal-Bench 1 tasks (task.yaml, run-tests.sh, …) as task folders in Harbor's layout.

Their verdict is that of Terminal-Bench: every test in pytest's short summary passed. Where there is no summary,
no reward is written, so that tests that could not run are a `verifier_error` and no score.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from dayfly.errors import NotFoundError, TaskError
from dayfly.importers.write import Imported, new_task, to_toml, write_program
from dayfly.tasks.compose import is_idle, load_compose_yaml, split_command

Seconds = Annotated[FiniteFloat, Field(gt=0)]
COMPOSE = "docker-compose.yaml"
PLACES = {
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
_OWN = re.compile(r"\$\{T_BENCH_[A-Z_]+\}")
_NOT_ENVIRONMENT = {"task.yaml", "run-tests.sh", "tests", "solution.sh", "solution.yaml", COMPOSE}


class Description(BaseModel):
    model_config = ConfigDict(extra="ignore")
    key: str
    description: str


class TaskYaml(BaseModel):
    """What task.yaml says that decides anything; the rest becomes metadata."""

    model_config = ConfigDict(extra="allow")
    instruction: str | None = None
    descriptions: list[Description] = []
    """The older form: several wordings; `base` is the one that is used."""
    parser_name: str = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 60.0
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False


class Keys(BaseModel):
    """An entry of solution.yaml: what is typed into the terminal."""

    model_config = ConfigDict(extra="ignore")
    command: str
    block: bool = False
    append_enter: bool = True


def find_terminal_bench(paths: list[Path]) -> list[Path]:
    """The task folders that `paths` name: each is one, or a folder of them. Raises `NotFoundError`."""
    found: list[Path] = []
    for path in paths:
        here = [path] if (path / "task.yaml").is_file() else sorted(p.parent for p in path.glob("*/task.yaml"))
        if not here:
            raise NotFoundError(
                f"{path} holds no Terminal-Bench task", hint="such a task is a folder with a task.yaml"
            )
        found += here
    return found


def import_terminal_bench(source: Path, to: Path, *, force: bool = False) -> Imported:
    """Make `to`/NAME of the task folder `source`. Raises `TaskError` naming what cannot be carried over."""
    config = _read_config(source / "task.yaml")
    name = source.resolve().name
    remarks: list[str] = []
    with new_task(to / name, str(source), force=force, remarks=remarks) as folder:
        main = _main_service(source / COMPOSE)
        network = "no-network" if main.get("network_mode") == "none" else "public"
        _write_environment(source, folder / "environment", main, remarks)
        _write_tests(source, folder / "tests", config)
        _write_solution(source, folder / "solution")
        (folder / "instruction.md").write_text(_instruction(config, source).rstrip("\n") + "\n", "utf-8")
        (folder / "task.toml").write_text(to_toml(_task_toml(config, network)), "utf-8")
    return Imported(name, to / name, tuple(remarks))


def _task_toml(config: TaskYaml, network: str) -> dict[str, Any]:
    return {
        "schema_version": "1.4",
        "metadata": {"source_format": "terminal-bench", **_plain(config.model_extra or {})},
        "agent": {"timeout_sec": config.max_agent_timeout_sec},
        "verifier": {"timeout_sec": config.max_test_timeout_sec},
        "environment": {"network_mode": network, "env": {"TEST_DIR": "/tests"}},
    }


def _plain(value: Any) -> Any:
    """YAML data as TOML can hold it: dates as texts, nothing left out silently but empty values."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_plain(v) for v in value if v is not None]
    return value if isinstance(value, str | int | float) else str(value)


# --- reading -------------------------------------------------------------------------------------


def _refused(what: str, why: str, hint: str) -> TaskError:
    return TaskError(f"{what}: {why}", hint=f"{hint}, or skip this task", cause="unsupported")


def _read_config(path: Path) -> TaskYaml:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as e:
        raise TaskError(f"{path}: {e.strerror}", hint="a Terminal-Bench task has a task.yaml") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise TaskError(f"{path} is not YAML: {e}", hint="mend the line named there") from e
    try:
        config = TaskYaml.model_validate(data)
    except ValidationError as e:
        one = e.errors(include_url=False)[0]
        key = ".".join(str(part) for part in one["loc"]) or "the file"
        raise TaskError(f"{path}: {key}: {one['msg']}", hint="see Terminal-Bench's description of tasks") from e
    if config.parser_name not in TEST_SCRIPTS:
        known = ", ".join(TEST_SCRIPTS)
        raise _refused(
            f"{path}: parser_name", f"{config.parser_name!r} is not carried over", f"known parsers: {known}"
        )
    if config.run_tests_in_same_shell:
        raise _refused(
            f"{path}: run_tests_in_same_shell",
            "tests run in a shell of their own, not in the agent's",
            "leave it out if the tests look at files and processes only",
        )
    return config


def _instruction(config: TaskYaml, source: Path) -> str:
    if config.instruction is not None:
        return config.instruction
    for entry in config.descriptions:
        if entry.key == "base":
            return entry.description
    raise TaskError(f"{source / 'task.yaml'}: there is no instruction", hint="write one")


# --- environment ---------------------------------------------------------------------------------


def _write_environment(source: Path, environment: Path, main: dict[str, Any], remarks: list[str]) -> None:
    build = main.pop("build", ".")
    build = {"context": build} if isinstance(build, str) else dict(build)
    context, dockerfile = str(build.pop("context", ".")), str(build.pop("dockerfile", "Dockerfile"))
    root = (source / context).resolve()
    if not root.is_relative_to(source.resolve()):
        raise _refused(f"{source / COMPOSE}: build.context", f"{context!r} lies outside of the task", "move it in")
    if "image" not in main and not (root / dockerfile).is_file():
        raise TaskError(f"{source}: there is no {context}/{dockerfile}", hint="a task needs a Dockerfile")
    _copy_context(source, root, environment)
    if dockerfile != "Dockerfile" and "image" not in main:
        if (environment / "Dockerfile").exists() or "/" in dockerfile:
            raise _refused(f"{source / COMPOSE}: build.dockerfile", f"{dockerfile!r}", "call it Dockerfile")
        (environment / dockerfile).rename(environment / "Dockerfile")
    if (environment / "Dockerfile").is_file():
        _copy_what_it_names(source, environment, remarks)
    if build:
        main["build"] = {"context": ".", **build}  # build arguments and the like: refused by their names
    if main:
        text = yaml.safe_dump({"services": {"main": main}}, sort_keys=False, allow_unicode=True)
        (environment / COMPOSE).write_text(text, "utf-8")


def _main_service(path: Path) -> dict[str, Any]:
    """The service that the agent works in, without what Terminal-Bench itself puts into every file."""
    if not path.is_file():
        return {}
    data = load_compose_yaml(path)
    for key, value in data.items():
        if key not in ("services", "version", "name") and not key.startswith("x-") and value:
            raise _refused(f"{path}: {key}", "a VM has no such thing", "leave it out")
    services = data.get("services")
    if not isinstance(services, dict) or not services:
        raise TaskError(f"{path}: there are no services", hint="see the Compose specification")
    name = "client" if "client" in services else next(iter(services))
    others = [f"services.{other}" for other in services if other != name]
    if others:
        raise _refused(f"{path}: {', '.join(others)}", "this version runs one service only", "use one image")
    main = services[name] or {}
    if not isinstance(main, dict):
        raise TaskError(f"{path}: services.{name} is not a table", hint="see the Compose specification")
    kept = {key: _without_own(value) for key, value in main.items() if key != "container_name"}
    words = split_command(kept.get("command"))
    if words is not None and is_idle(words):
        del kept["command"]
    return {key: value for key, value in kept.items() if value not in (None, "", [], {})}


def _without_own(value: Any) -> Any:
    """A value without Terminal-Bench's placeholders for names and mounts; its places in the VM are filled in."""
    if isinstance(value, dict):
        return {k: _without_own(v) for k, v in value.items()}
    if isinstance(value, list):
        kept = [_without_own(v) for v in value]
        return [v for v in kept if v not in ("", "TEST_DIR=/tests")]
    if not isinstance(value, str):
        return value
    for name, place in PLACES.items():
        value = value.replace(f"${{{name}}}", place)
    return "" if _OWN.search(value) else value


def _copy_context(source: Path, root: Path, environment: Path) -> None:
    """The build context, without what belongs to judge, oracle and Terminal-Bench."""
    own = root == source.resolve()

    def left_out(folder: str, names: list[str]) -> set[str]:
        return _NOT_ENVIRONMENT & set(names) if own and Path(folder) == root else set()

    shutil.copytree(root, environment, symlinks=True, ignore=left_out)


def _copy_what_it_names(source: Path, environment: Path, remarks: list[str]) -> None:
    """Tests or solution where the Dockerfile itself copies them into the image: that is how the task was made."""
    text = (environment / "Dockerfile").read_text("utf-8", "surrogateescape").replace("\\\n", " ")
    words = [w for line in text.splitlines() if re.match(r"\s*(COPY|ADD)\s", line, re.I) for w in line.split()[1:]]
    named = {w.removeprefix("./").split("/")[0] for w in words}
    for name in sorted(named & _NOT_ENVIRONMENT):
        if not (source / name).exists():
            continue
        if (source / name).is_dir():
            shutil.copytree(source / name, environment / name, symlinks=True)
        else:
            shutil.copy2(source / name, environment / name)
        remarks.append(f"the Dockerfile copies {name} into the image, where an agent can read it")
    if named & {".", ""}:
        remarks.append("the Dockerfile copies its whole context; tests and solution are no longer part of it")


# --- tests and solution --------------------------------------------------------------------------

_HEAD = """\
#!/bin/bash
# Runs the task's own run-tests.sh and gives the verdict that Terminal-Bench gives.
# No reward at all means that the tests did not run: that is no verdict.
log=/logs/verifier/run-tests.txt
bash /tests/run-tests.sh 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
"""

PYTEST_SCRIPT = (
    _HEAD
    + """\
summary= passed=0 failed=0
while IFS= read -r line; do
    line=${line%$'\\r'}
    if [[ -z $summary ]]; then
        [[ $line =~ ^=+[[:space:]]*[sS][hH][oO][rR][tT]\\ [tT][eE][sS][tT]\\ [sS][uU][mM][mM][aA][rR][yY]\\ \
[iI][nN][fF][oO][[:space:]]*=+ ]] && summary=1
        continue
    fi
    read -r word rest <<< "$line"
    [[ -n $rest ]] || continue
    case ${word%:} in
        PASSED | SKIPPED | XFAIL) passed=$((passed + 1)) ;;
        FAILED | ERROR | XPASS) failed=$((failed + 1)) ;;
    esac
done < "$log"
if [[ -z $summary || $((passed + failed)) -eq 0 ]]; then
    echo "there is no short test summary: the tests did not run (status $status)" >&2
    exit 1
fi
if [[ $failed -eq 0 ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""
)

SWEBENCH_SCRIPT = (
    _HEAD
    + """\
block=
inside=
while IFS= read -r line; do
    line=${line%$'\\r'}
    case $line in
        *"SWEBench results starts here"*) inside=1 seen=1 block= ;;
        *"SWEBench results ends here"*) [[ -n $inside ]] && ended=1; inside= ;;
        *) [[ -n $inside ]] && block+=$line ;;
    esac
done < "$log"
if [[ -z $seen || -z $ended ]]; then
    echo "there are no SWEBench results: the tests did not run (status $status)" >&2
    exit 1
fi
if [[ $block =~ ^[[:space:]]*PASSED[[:space:]]*$ ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""
)

TEST_SCRIPTS = {"pytest": PYTEST_SCRIPT, "swebench": SWEBENCH_SCRIPT}
"""Parser of Terminal-Bench → tests/test.sh."""


def _write_tests(source: Path, tests: Path, config: TaskYaml) -> None:
    script = source / "run-tests.sh"
    if not script.is_file():
        raise TaskError(f"{script} does not exist", hint="it is what judges the work")
    if (source / "tests").is_dir():
        shutil.copytree(source / "tests", tests, symlinks=True)
    for name in ("test.sh", "run-tests.sh", "Dockerfile", COMPOSE):
        if (tests / name).exists():
            raise _refused(f"{source / 'tests' / name}", "has a meaning of its own in Harbor's layout", "rename it")
    tests.mkdir(exist_ok=True)
    shutil.copy2(script, tests / "run-tests.sh")
    write_program(tests / "test.sh", TEST_SCRIPTS[config.parser_name])


def _write_solution(source: Path, solution: Path) -> None:
    if (source / "solution.sh").is_file():
        text = (source / "solution.sh").read_text("utf-8", "surrogateescape")
    elif (source / "solution.yaml").is_file():
        text = _typed(source / "solution.yaml")
    else:
        return
    # Terminal-Bench hands the file to bash, whatever its first line says.
    script = text if re.match(r"#!.*\bbash\b", text) else f"#!/bin/bash\n{text}"
    solution.mkdir()
    (solution / "solve.sh").write_text(script, "utf-8", "surrogateescape")
    (solution / "solve.sh").chmod(0o755)


def _typed(path: Path) -> str:
    """solution.yaml as a script, where it is commands each waited for, and no keys for a program on the screen."""
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
        commands = [Keys.model_validate(entry) for entry in data]
    except (yaml.YAMLError, UnicodeDecodeError, ValidationError, TypeError) as e:
        raise TaskError(f"{path} is not a list of commands: {e}", hint="mend it") from e
    for number, keys in enumerate(commands, 1):
        if not keys.append_enter or not keys.block:
            raise _refused(
                f"{path}: command {number}",
                f"{keys.command[:60]!r} is typed into a running program, which a script cannot do",
                "write a solution.sh",
            )
    return "".join(f"{keys.command}\n" for keys in commands)
