"""From a task folder to a `Task`. Read `load_task` first; the rest are its steps."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dayfly.errors import TaskError
from dayfly.model import (
    VERIFIER_CLASS_ORDER,
    Artifact,
    CollectHook,
    Healthcheck,
    Machine,
    McpServer,
    NetworkMode,
    Task,
    VerifierClass,
)
from dayfly.tasks.compose import COMPOSE_NAMES, ComposeMain, find_compose, read_compose, with_compose
from dayfly.tasks.downloads import downloads_in_tests
from dayfly.tasks.files import CarryRules, TaskFiles, read_task_files
from dayfly.tasks.findings import Findings, without_unknown_keys
from dayfly.tasks.schema import (
    SUPPORTED_SCHEMAS,
    ArtifactTable,
    EnvironmentTable,
    HealthcheckTable,
    NetworkTable,
    StepTable,
    TaskFile,
    VerifierTable,
    modernise,
    parse_size_mb,
)

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


def load_task(path: Path, *, strict: bool, force_build: bool = False) -> Task:
    """Read the task folder `path` in Harbor's layout.

    What is not understood is an error when `strict` (`dayfly check`), else it is in `Task.warnings`.
    `force_build`: environment/Dockerfile is built although docker_image names an image made of it before.
    Raises `TaskError`, naming file and key, for a task that cannot be run as it is meant.
    """
    folder = path.resolve()
    config_path = folder / "task.toml"
    findings = Findings(config_path)
    config = _read_config(config_path, findings)
    _refuse_unsupported(config, folder)
    if force_build and (folder / "environment" / "Dockerfile").is_file():
        config = config.model_copy(update={"environment": _without_image(config.environment)})
    files = read_task_files(folder)
    _remark_on_files(files, findings)
    _remark_on_features(config, folder, findings)
    if strict:
        for line in downloads_in_tests(folder):
            findings.remark(line)
    task = _whole_task(config, folder, files.digest, findings)
    if config.steps:
        task = with_steps(task, config, config.steps, findings)
    else:
        task = task.model_copy(update=_judging(config, None, task, findings))
    return task.model_copy(update={"warnings": findings.settle(strict=strict)})


def _whole_task(config: TaskFile, folder: Path, digest: str, findings: Findings) -> Task:
    """What holds for the task as a whole: its start context, and what it says of agents."""
    environment, own = config.environment, config.dayfly
    composed = find_compose(folder / "environment")
    compose = read_compose(composed) if composed is not None else None
    dockerfile, environment_files = _environment(config, folder, compose)
    task = Task(
        name=config.task.name if config.task is not None else folder.name,
        digest=digest,
        path=folder,
        instruction="" if config.steps else _instruction(folder / "instruction.md", findings),
        image=environment.docker_image,
        dockerfile=dockerfile,
        environment_files=environment_files,
        machine=_machine(environment, "environment", Machine(), folder, findings),
        env=environment.env,
        workdir=environment.workdir,
        healthcheck=_healthcheck(environment.healthcheck),
        agent_timeout_s=config.agent.timeout_sec,
        agent_user=config.agent.user,
        build_timeout_s=environment.build_timeout_sec,
        solution=_solution(folder / "solution", folder, findings),
        solution_env=config.solution.env,
        verifier_command=own.verify if own else None,
        artifacts=_artifacts(config.artifacts),
        skills_dir=environment.skills_dir,
        mcp_servers=tuple(McpServer(**m.model_dump()) for m in environment.mcp_servers),
        trajectory=None if config.steps else _trajectory(folder),
        network=_network(config),
        pass_reward=own.pass_reward if own else 1.0,
        reward_range=own.reward_range if own else None,
        tags=own.tags if own else (),
        metadata=config.metadata,
    )
    return task if compose is None else with_compose(task, compose)


def _judging(config: TaskFile, step: StepTable | None, task: Task, findings: Findings) -> dict[str, Any]:
    """The fields of a task, or of one step of it, that say how the work is judged."""
    folder = task.path
    tables = [config.verifier, *([step.verifier] if step else [])]
    judge = next((t.environment for t in reversed(tables) if t.environment is not None), None)
    chosen, declared = choose_verifier_class(config, step)
    _check_verifier_class(config, step, chosen, folder, findings)
    separate = chosen is VerifierClass.SEPARATE
    image, dockerfile = _verifier_image(judge, step, folder) if separate else (None, None)
    own_image = image is not None or dockerfile is not None
    tests, overlay = (None, None) if own_image else _tests(config, step, folder)
    judge = judge if separate else None
    default_user = None if own_image else task.verifier_user  # the Compose file's
    user = next((t.user for t in reversed(tables) if t.user is not None), default_user)
    label = f"steps.{step.name}.verifier.environment" if step else "verifier.environment"
    return {
        "verifier_class": chosen,
        "verifier_declared": declared,
        "verifier_timeout_s": tables[-1].timeout_sec,
        "verifier_env": {k: v for t in tables for k, v in {**(judge.env if judge else {}), **t.env}.items()},
        "verifier_user": user,
        "verifier_image": image,
        "verifier_dockerfile": dockerfile,
        "verifier_build_timeout_s": judge.build_timeout_sec if judge else task.build_timeout_s,
        "verifier_machine": _machine(judge, label, task.machine, folder, findings) if judge else None,
        "verifier_vm_env": judge.env if judge and own_image else {} if own_image else None,
        "verifier_workdir": judge.workdir if judge else None,
        "verifier_healthcheck": _healthcheck(judge.healthcheck) if judge else None,
        "tests": tests,
        "tests_overlay": overlay,
        "collect": tuple(
            CollectHook(command=h.command, timeout_s=h.timeout_sec, user=h.user) for t in tables for h in t.collect
        ),
    }


def with_steps(task: Task, config: TaskFile, tables: list[StepTable], findings: Findings) -> Task:
    """The task with its steps, and with what fits all of them in its own fields."""
    steps = tuple(_step(task, config, table, first=n == 0, findings=findings) for n, table in enumerate(tables))
    _remark_on_stray_steps(task.path, {t.name for t in tables}, findings)
    weakest = min((s.verifier_class for s in steps), key=VERIFIER_CLASS_ORDER.index)
    limits = [s.agent_timeout_s for s in steps if s.agent_timeout_s is not None]
    return task.model_copy(
        update={
            "steps": steps,
            "reward_strategy": config.multi_step_reward_strategy or "mean",
            "instruction": "\n\n".join(s.instruction for s in steps),
            "agent_timeout_s": sum(limits) if len(limits) == len(steps) else None,
            "agent_user": steps[0].agent_user,
            "solution": steps[0].solution if all(s.solution for s in steps) else None,
            "verifier_class": weakest,
            "verifier_declared": any(s.verifier_declared for s in steps),
            "verifier_timeout_s": sum(s.verifier_timeout_s for s in steps),
        }
    )


def _step(task: Task, config: TaskFile, table: StepTable, *, first: bool, findings: Findings) -> Task:
    """One step as a task of its own: the whole task's fields, and over them the step's."""
    folder = task.path / "steps" / table.name
    if not folder.is_dir():
        raise TaskError(
            f"{task.path / 'task.toml'}: step {table.name!r} has no folder {folder}",
            hint=f"make it, with an instruction.md, or take the step out; there are: {_listed_steps(task.path)}",
        )
    reward = table.min_reward
    work = folder / "workdir"
    trajectory = _trajectory(folder)
    if trajectory is not None and not first:
        findings.remark(f"steps/{table.name}/trajectory.json is not used: only the first step can have one")
    update: dict[str, Any] = {
        "step": table.name,
        "instruction": _instruction(folder / "instruction.md", findings),
        "step_files": work if work.is_dir() else None,
        "step_healthcheck": _healthcheck(table.healthcheck),
        "agent_timeout_s": table.agent.timeout_sec or task.agent_timeout_s,
        "agent_user": table.agent.user if table.agent.user is not None else task.agent_user,
        "solution": _solution(folder / "solution", task.path, findings) or task.solution,
        "artifacts": task.artifacts + _artifacts(table.artifacts),
        "trajectory": trajectory if first else None,
        "min_reward": reward if isinstance(reward, dict) else {} if reward is None else {"reward": reward},
    }
    return task.model_copy(update={**update, **_judging(config, table, task, findings)})


def choose_verifier_class(config: TaskFile, step: StepTable | None = None) -> tuple[VerifierClass, bool]:
    """Where the verifier runs, and whether the task itself says so. The whole rule is here.

    1. `[dayfly] verifier_class`: written for dayfly, so it wins. (Harbor has no word for `rebooted`.)
    2. `environment_mode`, or `separate` when there is a verifier environment: Harbor's words. What a step says
       goes before what the task says.
    3. A task with a `[dayfly]` table was written with dayfly in mind, so it gets our stricter defaults:
       `separate` when it declares artifacts (they say what the work is, so nothing else need cross), else
       `rebooted` (no process of the agent lives, and no file can be missing). Between steps the agent's VM must
       live on, so a step is `shared` where a task would be `rebooted`.
    4. Any other Harbor task keeps Harbor's default `shared`: it may grade a process that must still run.
    """
    if config.dayfly is not None and config.dayfly.verifier_class is not None:
        return config.dayfly.verifier_class, True
    for judge in (step.verifier if step else None, config.verifier):
        if judge is not None and (judge.environment_mode is not None or judge.environment is not None):
            return VerifierClass(judge.environment_mode or "separate"), True
    if config.dayfly is not None:
        if config.artifacts or (step and step.artifacts):
            return VerifierClass.SEPARATE, False
        return (VerifierClass.SHARED if step else VerifierClass.REBOOTED), False
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


def _instruction(path: Path, findings: Findings) -> str:
    text = strip_canary(_read_text(path, "an instruction.md: what the agent is told"))
    if not text.strip():
        findings.remark(f"{path} is empty: an agent is told nothing")
    return text


def _trajectory(folder: Path) -> Path | None:
    path = folder / "trajectory.json"
    return path if path.is_file() else None


# --- what this version does not do ---------------------------------------------------------------


def _refuse_unsupported(config: TaskFile, folder: Path) -> None:
    """Refuse, by name, whatever would make the task another one if it were left out."""
    where = folder / "task.toml"
    judges = [t.environment for t in _verifier_tables(config) if t.environment is not None]
    environments = [config.environment, *judges]
    services = {a.service for t in (config, *(config.steps or ())) for a in t.artifacts}
    services |= {h.service for t in _verifier_tables(config) for h in t.collect}
    services -= {None, "main"}
    listed = [name for name, table in _network_tables(config) if table.network_mode == "allowlist"]
    for found, what, instead in (
        (services, f"other services than `main` ({', '.join(sorted(map(str, services)))})", "use one image"),
        (any(e.os == "windows" for e in environments), "Windows tasks", "use a Linux image"),
        (any(e.gpus or e.gpu_types for e in environments), "GPUs", "leave gpus out if the task works without"),
        (any(e.tpu for e in environments), "TPUs", "leave tpu out if the task works without"),
        (
            listed,
            f'{listed[0] if listed else ""}.network_mode = "allowlist": no VM has a network',
            'say network_mode = "no-network" if the task works without',
        ),
        (
            config.steps and config.dayfly and config.dayfly.verifier_class is VerifierClass.REBOOTED,
            "multi-step tasks as rebooted, because the agent's VM must live on between steps",
            'say verifier_class = "separate" or "shared"',
        ),
    ):
        if found:
            raise TaskError(
                f"{where}: this version does not run {what}",
                hint=f"{instead}, or skip this task",
                cause="unsupported",
            )


def _verifier_tables(config: TaskFile) -> list[VerifierTable]:
    return [config.verifier, *(s.verifier for s in config.steps or [])]


def _network_tables(config: TaskFile) -> list[tuple[str, NetworkTable]]:
    """Dotted name and table, of every table with network settings."""
    found: list[tuple[str, NetworkTable]] = [("environment", config.environment)]
    parts: list[tuple[str, TaskFile | StepTable]] = [("", config)]
    parts += [(f"steps.{s.name}.", s) for s in config.steps or []]
    for prefix, part in parts:
        found += [(f"{prefix}agent", part.agent), (f"{prefix}verifier", part.verifier)]
        if part.verifier.environment is not None:
            found.append((f"{prefix}verifier.environment", part.verifier.environment))
    return found


def _remark_on_features(config: TaskFile, folder: Path, findings: Findings) -> None:
    """No VM of this version has a network. `public` is only the format's default, so silence asks for nothing."""
    for name, mode in _network(config).items():
        if mode == "public":
            findings.remark(f"{name} asks for a public network; the VM has none in this version")
    if config.multi_step_reward_strategy and not config.steps:
        findings.remark("multi_step_reward_strategy says nothing of a task without steps")
    if config.steps and (folder / "instruction.md").exists():
        findings.remark("instruction.md is not used: each step has its own")


def _network(config: TaskFile) -> dict[str, NetworkMode]:
    """What the task asks for in so many words, by table."""
    asked: dict[str, NetworkMode] = {}
    for name, table in _network_tables(config):
        if table.network_mode is not None:
            asked[name] = table.network_mode
        elif isinstance(table, EnvironmentTable) and table.allow_internet is not None:
            asked[name] = "public" if table.allow_internet else "no-network"
    return asked


def _remark_on_stray_steps(folder: Path, named: set[str], findings: Findings) -> None:
    stray = [p.name for p in sorted((folder / "steps").iterdir()) if p.is_dir() and p.name not in named]
    if stray:
        findings.remark(f"steps/ holds folders that [[steps]] does not name: {', '.join(stray)}")


def _listed_steps(folder: Path) -> str:
    steps = folder / "steps"
    return ", ".join(sorted(p.name for p in steps.iterdir())) if steps.is_dir() else "none"


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


def _without_image(table: EnvironmentTable) -> EnvironmentTable:
    return table.model_copy(update={"docker_image": None})


def _environment(config: TaskFile, folder: Path, compose: ComposeMain | None) -> tuple[Path | None, Path | None]:
    """The Dockerfile to build, if that is the image; the loose files, if they are uploaded (Harbor's rule)."""
    environment = folder / "environment"
    dockerfile = environment / "Dockerfile"
    if config.environment.docker_image is None:
        if compose is not None and (compose.image is not None or compose.build is not None):
            return compose.build, None
        if not dockerfile.is_file():
            raise TaskError(
                f"{folder}: neither environment.docker_image nor environment/Dockerfile says what the VM holds",
                hint='name an image in task.toml: [environment] docker_image = "…"',
            )
        return dockerfile, None
    described = dockerfile.exists() or compose is not None
    loose = environment.is_dir() and not described and any(environment.iterdir())
    return None, environment if loose else None


def _machine(table: EnvironmentTable, name: str, default: Machine, folder: Path, findings: Findings) -> Machine:
    where = folder / "task.toml"
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


def _artifacts(tables: list[ArtifactTable]) -> tuple[Artifact, ...]:
    return tuple(Artifact(source=a.source, destination=a.destination, exclude=tuple(a.exclude)) for a in tables)


def _healthcheck(check: HealthcheckTable | None) -> Healthcheck | None:
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


def _tests(config: TaskFile, step: StepTable | None, folder: Path) -> tuple[Path | None, Path | None]:
    """The folder that is put to /tests, and the step's that is put over it; None when there is nothing to put."""
    shared = folder / "tests"
    places = [shared] if step is None else [shared, folder / "steps" / step.name / "tests"]
    there = [p if p.is_dir() else None for p in places]
    found = (there[0], there[1]) if len(there) > 1 else (there[0], None)
    if config.dayfly is not None and config.dayfly.verify is not None:
        return found
    scripts = [p / "test.sh" for p in there if p is not None and (p / "test.sh").is_file()]
    if not scripts:
        also = " (test.bat is for Windows)" if any((p / "test.bat").exists() for p in places) else ""
        raise TaskError(
            f"{places[-1].parent}: there is no tests/test.sh{also}: nothing judges the work",
            hint="write one, or name a program: [dayfly] verify = [...]",
        )
    for script in scripts:
        if CarryRules(folder).excludes(script):
            raise TaskError(
                f"{script} is left out by {script.parent / '.harborignore'}", hint="take that rule away"
            )
    return found


def _verifier_image(
    judge: EnvironmentTable | None, step: StepTable | None, folder: Path
) -> tuple[str | None, Path | None]:
    """The image, or the Dockerfile, of a separate verifier's own; neither: it runs on the task's image."""
    if judge is not None and judge.docker_image is not None:
        return judge.docker_image, None
    tests = folder / "tests"
    if step is not None and (folder / "steps" / step.name / "tests").is_dir():
        tests = folder / "steps" / step.name / "tests"
    for name in COMPOSE_NAMES:
        if (tests / name).exists():
            raise TaskError(
                f"{tests / name}: this version does not run Compose environments for verifiers",
                hint="use one image, or skip this task",
                cause="unsupported",
            )
    dockerfile = tests / "Dockerfile"
    return None, dockerfile if dockerfile.is_file() else None


def _check_verifier_class(
    config: TaskFile, step: StepTable | None, chosen: VerifierClass, folder: Path, findings: Findings
) -> None:
    own = config.dayfly
    judge = (step.verifier.environment if step else None) or config.verifier.environment
    if judge is not None and own is not None and own.verifier_class not in (None, VerifierClass.SEPARATE):
        raise TaskError(
            f"{folder / 'task.toml'}: [verifier.environment] is a machine of its own, which "
            f"dayfly.verifier_class = {chosen.value!r} excludes",
            hint="leave one of them out",
        )
    if chosen is VerifierClass.SEPARATE and not config.artifacts and not (step and step.artifacts):
        findings.remark("verifier class separate without artifacts: only /logs/artifacts reaches the verifier")


def _solution(solution: Path, folder: Path, findings: Findings) -> Path | None:
    script = solution / "solve.sh"
    if not script.is_file():
        if solution.is_dir():
            findings.remark(f"{solution} has no solve.sh, so the oracle agent cannot apply it")
        return None
    if CarryRules(folder).excludes(script):
        raise TaskError(f"{script} is left out by {solution / '.harborignore'}", hint="take that rule away")
    return solution
