"""`dayfly check` and `dayfly init`: tasks that can be trusted, and a first one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dayfly.check import check_tasks
from dayfly.cli.common import DEFAULT_JOBS_DIR, ForceBuild, JobsDir, Json, command_line
from dayfly.cli.display import Display, default_display, displayed
from dayfly.cli.interrupts import Interrupted, run_interruptible
from dayfly.cli.output import put, put_json, say
from dayfly.errors import ConfigError, TaskError
from dayfly.job import JobResult, Plan, parse_job, run_job
from dayfly.model import Task
from dayfly.tasks import Field, find_tasks, load_task, understood

Report = dict[str, Any]


def register(app: typer.Typer) -> None:
    app.command()(check)
    app.command()(init)


def check(
    tasks: Annotated[list[Path], typer.Argument(help="Task folders, or folders of task folders.")],
    static: Annotated[bool, typer.Option("--static", help="Only read the files; start no VM.")] = False,
    repeats: Annotated[int, typer.Option(min=2, max=100, help="How often the reference solution runs.")] = 2,
    hypervisor: Annotated[
        str, typer.Option(envvar="DAYFLY_HYPERVISOR", help="qemu, or fake (no isolation, for trials).")
    ] = "qemu",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, max=10_000, help="How many rollouts at once.")
    ] = None,
    force_build: ForceBuild = None,
    fields: Annotated[
        bool | None,
        typer.Option(
            "--fields/--no-fields",
            help="Print what was understood of every field of task.toml. Default: for a single task only; of "
            "several, what has no effect.",
        ),
    ] = None,
    jobs_dir: JobsDir = DEFAULT_JOBS_DIR,
    json: Json = False,
) -> None:
    """Is a task fit to judge agents? The oracle must pass, doing nothing must fail, repeats start equal.

    Unknown keys are errors here, and so are commits in a repository that an agent could read the answer from.
    Exit 1 when a task is not fit, 4 when something could not be tried.
    """
    loaded, refused = [], []
    read: dict[str, list[Field]] = {}
    for folder in find_tasks(tasks):
        try:
            loaded.append(load_task(folder, strict=True, force_build=bool(force_build)))
            read[loaded[-1].name] = understood(folder)
        except TaskError as error:
            refused.append({"task": str(folder), "fit": False, "problems": [error.message], "hint": error.hint})
            read[str(folder)] = understood(folder)
    reports: list[Report] = [
        {"task": t.name, "fit": True, "problems": [], "remarks": list(t.warnings)} for t in loaded
    ]
    if not static and loaded:
        display: Display = "none" if json else default_display()
        reports = _try_out(loaded, hypervisor, concurrency, bool(force_build), repeats, jobs_dir, display)
    reports = [*refused, *reports]
    if json:
        told = [r | {"fields": [f.as_dict() for f in read[r["task"]]]} for r in reports]
        put_json({"schema_version": 1, "tasks": told})
    else:
        every = len(reports) == 1 if fields is None else fields
        shown = {name: [f for f in found if every or f.state != "used"] for name, found in read.items()}
        _put_reports(reports, {} if fields is False else shown, static, jobs_dir)
    if any(r["fit"] is False for r in reports):
        raise typer.Exit(1)
    if any(r["fit"] is None for r in reports):
        raise typer.Exit(4)


def _try_out(
    tasks: list[Task],
    hypervisor: str,
    concurrency: int | None,
    force_build: bool,
    repeats: int,
    jobs_dir: Path,
    display: Display,
) -> list[Report]:
    settings = parse_job(
        {
            "tasks": ["."],
            "agents": ["no-op"],
            "hypervisor": hypervisor,
            "concurrency": concurrency,
            "force_build": force_build,
        },
        "check",
    )

    async def run_plan(plan: Plan) -> JobResult:
        with displayed(display) as observers:
            result = await run_job(plan, observers=observers)
        if result.interrupted:  # half a job says nothing of a task
            raise Interrupted
        return result

    try:
        found = run_interruptible(lambda: check_tasks(tasks, settings, repeats, jobs_dir, run_plan))
    except (Interrupted, KeyboardInterrupt):
        say("interrupted: nothing is said about these tasks; what was run is in `dayfly list`")
        raise
    return [r.as_dict() for r in found]


def _put_reports(reports: list[Report], fields: dict[str, list[Field]], static: bool, jobs_dir: Path) -> None:
    for report in reports:
        strictest = report.get("strictest_verifier_class")
        tail = f"  (strictest verifier class: {strictest})" if strictest else ""
        words = {True: "reads" if static else "fit", False: "NOT FIT", None: "UNKNOWN"}
        put(f"{words[report['fit']]}  {report['task']}{tail}")
        for problem in report["problems"]:
            put(f"    problem: {problem}")
        for fault in report.get("unjudged", []):
            put(f"    not tried: {fault}")
        for line in (report.get("hint") or "").splitlines():
            put(f"    hint: {line}")
        for remark in report.get("remarks", []):
            put(f"    remark: {remark}")
        for field in fields.get(report["task"], []):
            note = f"  ({field.note})" if field.note else ""
            put(f"    {field.state + ':':8} {field.key} = {_short(field.value)}{note}")
        if not report["fit"] and report.get("jobs"):
            put(f"    look: {' · '.join(command_line('show', job, jobs_dir=jobs_dir) for job in report['jobs'])}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 70 else text[:67] + "..."


TASK_TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
docker_image = "dayfly/demo-base:latest"
cpus = 1
memory_mb = 512
storage_mb = 1024
workdir = "/app"

[[artifacts]]
source = "/app/greeting.txt"

[dayfly]
verifier_class = "separate"
"""

STARTER: dict[str, str] = {
    "tasks/hello/task.toml": TASK_TOML,
    "tasks/hello/instruction.md": "Write the text `hello, world` and a newline into the file /app/greeting.txt.\n",
    "tasks/hello/solution/solve.sh": "#!/bin/sh\nprintf 'hello, world\\n' > /app/greeting.txt\n",
    "tasks/hello/tests/test.sh": """\
#!/bin/sh
# Runs in a fresh VM that the agent never touched; only /app/greeting.txt was carried over.
# No reward at all means "the verifier is broken"; 0 means "the work is not done".
if [ "$(cat /app/greeting.txt 2>/dev/null)" = "hello, world" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
""",
    "job.yaml": """\
name: hello
tasks: [tasks]
agents: [oracle, no-op]
attempts: 2
""",
}


def init(
    folder: Annotated[Path, typer.Argument(help="Where to make the job and its first task.")] = Path(),
) -> None:
    """Make a job file and a first task to change. Overwrites nothing."""
    there = [name for name in STARTER if (folder / name).exists()]
    if there:
        raise ConfigError(f"{folder / there[0]} exists", hint="`init` overwrites nothing; name a new folder")
    for name, text in STARTER.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        put(str(path))
    say(f"next: {command_line('check', str(folder / 'tasks'))}")
    say(f"then: {command_line('run', str(folder / 'job.yaml'))}")
