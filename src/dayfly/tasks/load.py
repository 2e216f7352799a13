"""From a task folder to a `Task`. Read `load_task` first; the rest are its steps."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dayfly.errors import TaskError
from dayfly.model import Artifact, CollectHook, Healthcheck, Machine, Task, VerifierClass
from dayfly.tasks.files import CarryRules, TaskFiles, read_task_files
from dayfly.tasks.findings import Findings, without_unknown_keys
from dayfly.tasks.schema import (
    SUPPORTED_SCHEMAS,
    EnvironmentTable,
    NetworkTable,
    TaskFile,
    modernise,
    parse_size_mb,
)

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def load_task(path: Path, *, strict: bool) -> Task:
    """Read the task folder `path` in Harbor's layout.

    What is not understood is an error when `strict` (`dayfly check`), else it is in `Task.warnings`.
    Raises `TaskError`, naming file and key, for a task that cannot be run as it is meant.
    """
    folder = path.resolve()
    config_path = folder / "task.toml"
    findings = Findings(config_path)
    config = _read_config(config_path, findings)
    _refuse_unsupported(config, folder)
    files = read_task_files(folder)
    _remark_on_files(files, findings)
    _remark_on_features(config, folder, findings)
    verifier_class, declared = choose_verifier_class(config)
    environment = config.environment
    dockerfile, environment_files = _environment(config, folder, findings)
    machine = _machine(environment, "environment", Machine(), config_path, findings)
    tests = _tests(config, folder)
    _check_verifier_image(config, verifier_class, folder, findings)
    solution = _solution(folder, findings)
    own = config.dayfly
    judge = config.verifier.environment
    return Task(
        name=config.task.name if config.task is not None else folder.name,
        digest=files.digest,
        path=folder,
        instruction=_instruction(folder, findings),
        image=environment.docker_image,
        dockerfile=dockerfile,
        environment_files=environment_files,
        machine=machine,
        env=environment.env,
        workdir=environment.workdir,
        healthcheck=_healthcheck(environment),
        agent_timeout_s=config.agent.timeout_sec,
        agent_user=config.agent.user,
        build_timeout_s=environment.build_timeout_sec,
        solution=solution,
        solution_env=config.solution.env,
        tests=tests,
        verifier_class=verifier_class,
        verifier_declared=declared,
        verifier_timeout_s=config.verifier.timeout_sec,
        verifier_env={**(judge.env if judge else {}), **config.verifier.env},
        verifier_user=config.verifier.user,
        verifier_command=own.verify if own else None,
        verifier_image=judge.docker_image if judge else None,
        verifier_machine=_machine(judge, "verifier.environment", machine, config_path, findings) if judge else None,
        collect=tuple(
            CollectHook(command=h.command, timeout_s=h.timeout_sec, user=h.user) for h in config.verifier.collect
        ),
        artifacts=tuple(
            Artifact(source=a.source, destination=a.destination, exclude=tuple(a.exclude)) for a in config.artifacts
        ),
        pass_reward=own.pass_reward if own else 1.0,
        reward_range=own.reward_range if own else None,
        tags=own.tags if own else (),
        metadata=config.metadata,
        warnings=findings.settle(strict=strict),
    )


def choose_verifier_class(config: TaskFile) -> tuple[VerifierClass, bool]:
    """Where the verifier runs, and whether the task itself says so. The whole rule is here.

    1. `[dayfly] verifier_class`: written for dayfly, so it wins. (Harbor has no word for `rebooted`.)
    2. `[verifier] environment_mode`, or `separate` when there is a `[verifier.environment]`: Harbor's words.
    3. A task with a `[dayfly]` table was written with dayfly in mind, so it gets our stricter defaults:
       `separate` when it declares artifacts (they say what the work is, so nothing else need cross), else
       `rebooted` (no process of the agent lives, and no file can be missing).
    4. Any other Harbor task keeps Harbor's default `shared`: it may grade a process that must still run.
    """
    judge = config.verifier
    if config.dayfly is not None and config.dayfly.verifier_class is not None:
        return config.dayfly.verifier_class, True
    if judge.environment_mode is not None or judge.environment is not None:
        return VerifierClass(judge.environment_mode or "separate"), True
    if config.dayfly is not None:
        return (VerifierClass.SEPARATE if config.artifacts else VerifierClass.REBOOTED), False
    return VerifierClass.SHARED, False


def strip_canary(text: str) -> str:
    """Drop leading canary comments, which mark benchmark data, and the blank lines after them."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.match(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


# --- reading -------------------------------------------------------------------------------------


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise TaskError(f"{path} is not UTF-8: {e.reason} at byte {e.start}", hint="save it as UTF-8") from e
    except OSError as e:
        raise TaskError(f"{path}: {e.strerror}", hint=f"a task needs {what}") from e


def _read_config(path: Path, findings: Findings) -> TaskFile:
    text = _read_text(path, "a task.toml; `dayfly init` makes one to start from")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise TaskError(f"{path} is not TOML: {e}", hint="mend the line named there") from e
    data = without_unknown_keys(modernise(data), TaskFile, findings)
    try:
        config = TaskFile.model_validate(data)
    except ValidationError as e:
        raise _validation_error(path, e) from e
    if config.schema_version not in SUPPORTED_SCHEMAS:
        findings.remark(
            f"schema_version {config.schema_version!r} is read as 1.4; dayfly knows {', '.join(SUPPORTED_SCHEMAS)}"
        )
    return config


def _validation_error(path: Path, error: ValidationError) -> TaskError:
    problems = []
    for one in error.errors(include_url=False)[:5]:
        key = ".".join(str(part) for part in one["loc"]) or "task.toml"
        given = "" if isinstance(one["input"], dict | list) else f", not {_short(one['input'])}"
        problems.append(f"{key}: {one['msg'].removeprefix('Value error, ')}{given}")
    return TaskError(f"{path}: {'; '.join(problems)}", hint="see docs/tasks.md for the keys and their values")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _instruction(folder: Path, findings: Findings) -> str:
    text = strip_canary(_read_text(folder / "instruction.md", "an instruction.md: what the agent is told"))
    if not text.strip():
        findings.remark("instruction.md is empty: an agent is told nothing")
    return text


# --- what this version does not do ---------------------------------------------------------------


def _refuse_unsupported(config: TaskFile, folder: Path) -> None:
    """Refuse, by name, whatever would make the task another one if it were left out."""
    environment, judge = config.environment, config.verifier.environment
    where = folder / "task.toml"
    compose = [n for n in _COMPOSE if (folder / "environment" / n).exists()]
    services = {a.service for a in config.artifacts} | {h.service for h in config.verifier.collect}
    services -= {None, "main"}
    for found, what, instead in (
        (config.steps, "multi-step tasks (`steps`)", "split it into single-step tasks"),
        (compose, f"Compose environments (environment/{compose[0] if compose else ''})", "use one image"),
        (services, f"other services than `main` ({', '.join(sorted(map(str, services)))})", "use one image"),
        ("windows" in (environment.os, judge.os if judge else ""), "Windows tasks", "use a Linux image"),
        (environment.gpus or environment.gpu_types, "GPUs", "leave gpus out if the task works without"),
        (environment.tpu, "TPUs", "leave tpu out if the task works without"),
    ):
        if found:
            raise TaskError(
                f"{where}: this version does not run {what}",
                hint=f"{instead}, or skip this task",
                cause="unsupported",
            )


def _remark_on_features(config: TaskFile, folder: Path, findings: Findings) -> None:
    environment, judge = config.environment, config.verifier.environment
    _remark_on_network(config, findings)
    for found, what in (
        (environment.mcp_servers, "environment.mcp_servers are not offered to agents"),
        (environment.skills_dir, "environment.skills_dir is not given to agents"),
        ((folder / "trajectory.json").exists(), "trajectory.json is not loaded into the agent's session"),
        (
            judge and judge.workdir not in (None, environment.workdir),
            "verifier.environment.workdir is not used; the task's workdir is",
        ),
        (
            judge and judge.healthcheck not in (None, environment.healthcheck),
            "verifier.environment.healthcheck is not run; the task's is",
        ),
    ):
        if found:
            findings.remark(f"{what} in this version")


def _remark_on_network(config: TaskFile, findings: Findings) -> None:
    """No VM of this version has a network. `public` is only the format's default, so silence asks for nothing."""
    tables: dict[str, NetworkTable | None] = {
        "environment": config.environment,
        "agent": config.agent,
        "verifier": config.verifier,
        "verifier.environment": config.verifier.environment,
    }
    for name, table in tables.items():
        if table is None:
            continue
        legacy = isinstance(table, EnvironmentTable) and table.allow_internet
        if table.network_mode == "allowlist":
            findings.doubt(
                f'{name}.network_mode = "allowlist": the VM has no network in this version',
                'say network_mode = "no-network" if the task works without',
            )
        elif table.network_mode == "public" or (legacy and table.network_mode is None):
            findings.remark(f"{name} asks for a public network; the VM has none in this version")


def _remark_on_files(files: TaskFiles, findings: Findings) -> None:
    if files.not_carried:
        findings.remark(f".harborignore leaves out {_listed(files.not_carried)}")
    if files.not_hashed:
        findings.remark(
            f"carried into a VM but not covered by the task's digest (.gitignore or its default): "
            f"{_listed(files.not_hashed)}"
        )


def _listed(names: tuple[str, ...], most: int = 10) -> str:
    tail = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} file(s): {', '.join(names[:most])}{tail}"


# --- parts ---------------------------------------------------------------------------------------


def _environment(config: TaskFile, folder: Path, findings: Findings) -> tuple[Path | None, Path | None]:
    """The Dockerfile to build, if that is the image; the loose files, if they are uploaded (Harbor's rule)."""
    environment = folder / "environment"
    dockerfile = environment / "Dockerfile"
    if config.environment.docker_image is None:
        if not dockerfile.is_file():
            raise TaskError(
                f"{folder}: neither environment.docker_image nor environment/Dockerfile says what the VM holds",
                hint='name an image in task.toml: [environment] docker_image = "…"',
            )
        findings.remark("the image is environment/Dockerfile, which this version cannot build; name a docker_image")
        return dockerfile, None
    loose = environment.is_dir() and not dockerfile.exists() and any(environment.iterdir())
    return None, environment if loose else None


def _machine(table: EnvironmentTable, name: str, default: Machine, where: Path, findings: Findings) -> Machine:
    cpus = default.cpus
    if table.cpus is not None:
        cpus = math.ceil(table.cpus)
        if cpus != table.cpus:
            findings.remark(f"{name}.cpus = {table.cpus:g} is rounded up to {cpus}: a VM has whole CPUs")
    try:
        return Machine(
            cpus=cpus,
            memory_mib=_megabytes(table, name, "memory", where, findings) or default.memory_mib,
            storage_mib=_megabytes(table, name, "storage", where, findings) or default.storage_mib,
        )
    except ValidationError as e:
        one = e.errors()[0]
        key = {"memory_mib": "memory_mb", "storage_mib": "storage_mb"}.get(str(one["loc"][0]), str(one["loc"][0]))
        raise TaskError(f"{where}: {name}.{key}: {one['msg']}", hint="change the size") from e


def _megabytes(table: EnvironmentTable, name: str, what: str, where: Path, findings: Findings) -> int | None:
    """`memory_mb`, or the legacy `memory = "2G"`."""
    new: int | None = getattr(table, f"{what}_mb")
    old: str | None = getattr(table, what)
    if old is None:
        return new
    try:
        value = parse_size_mb(old)
    except ValueError as e:
        raise TaskError(f"{where}: {name}.{what}: {e}", hint=f"write {what}_mb = 2048") from e
    if new is not None and new != value:
        raise TaskError(
            f"{where}: {name}.{what} = {old!r} and {name}.{what}_mb = {new} contradict each other",
            hint=f"keep {what}_mb only",
        )
    findings.remark(f"{name}.{what} is an old spelling of {what}_mb = {value}")
    return value


def _healthcheck(table: EnvironmentTable) -> Healthcheck | None:
    check = table.healthcheck
    if check is None:
        return None
    return Healthcheck(
        command=check.command,
        interval_s=check.interval_sec,
        timeout_s=check.timeout_sec,
        start_period_s=check.start_period_sec,
        start_interval_s=check.start_interval_sec,
        retries=check.retries,
    )


def _tests(config: TaskFile, folder: Path) -> Path | None:
    """The folder that is put to /tests; None when there is nothing to put."""
    tests = folder / "tests"
    judge = config.verifier.environment
    if judge is not None and judge.docker_image is not None:
        return None  # Harbor's rule: such an image owns /tests
    if config.dayfly is not None and config.dayfly.verify is not None:
        return tests if tests.is_dir() else None
    script = tests / "test.sh"
    if not script.is_file():
        also = " (test.bat is for Windows)" if (tests / "test.bat").exists() else ""
        raise TaskError(
            f"{folder}: there is no tests/test.sh{also}: nothing judges the work",
            hint="write one, or name a program: [dayfly] verify = [...]",
        )
    if CarryRules(folder).excludes(script):
        raise TaskError(f"{script} is left out by {tests / '.harborignore'}", hint="take that rule away")
    return tests


def _check_verifier_image(config: TaskFile, chosen: VerifierClass, folder: Path, findings: Findings) -> None:
    has_own = config.verifier.environment is not None
    if has_own and chosen is not VerifierClass.SEPARATE:
        raise TaskError(
            f"{folder / 'task.toml'}: [verifier.environment] is a machine of its own, which "
            f"dayfly.verifier_class = {chosen.value!r} excludes",
            hint="leave one of them out",
        )
    image = config.verifier.environment.docker_image if config.verifier.environment else None
    if chosen is VerifierClass.SEPARATE and image is None and (folder / "tests" / "Dockerfile").exists():
        raise TaskError(
            f"{folder}: this version does not build verifier images (tests/Dockerfile)",
            hint="build it elsewhere and name it as verifier.environment.docker_image, or skip this task",
            cause="unsupported",
        )
    if chosen is VerifierClass.SEPARATE and not config.artifacts:
        findings.remark("verifier class separate without artifacts: only /logs/artifacts reaches the verifier")


def _solution(folder: Path, findings: Findings) -> Path | None:
    solution = folder / "solution"
    script = solution / "solve.sh"
    if not script.is_file():
        if solution.is_dir():
            findings.remark("solution/ has no solve.sh, so the oracle agent cannot apply it")
        return None
    if CarryRules(folder).excludes(script):
        raise TaskError(f"{script} is left out by {solution / '.harborignore'}", hint="take that rule away")
    return solution
