"""`dayfly check`: is a task fit to judge agents?

The program is tested like anything else: the reference solution must pass, doing nothing must fail, and
repeats must start equal. What is found here is about the task, not about any agent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from dayfly.evidence import JobFolder
from dayfly.history import RESULT_NAME, problems_in
from dayfly.job import JobFile, JobResult, Plan, plan_new
from dayfly.model import VERIFIER_CLASS_ORDER, Outcome, RolloutRecord, Task, VerifierClass

RunPlan = Callable[[Plan], Awaitable[JobResult]]


@dataclass
class TaskReport:
    """What `check` says of one task."""

    name: str
    problems: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    """What infrastructure kept from being found out; says nothing about the task."""
    remarks: list[str] = field(default_factory=list)
    strictest: VerifierClass | None = None
    """The strictest verifier class in which the reference solution passes."""
    jobs: list[str] = field(default_factory=list)
    """Jobs whose evidence backs this report."""

    @property
    def fit(self) -> bool | None:
        """None: not known, because something could not be run."""
        return False if self.problems else None if self.unjudged else True

    def as_dict(self) -> dict[str, object]:
        return {
            "task": self.name,
            "fit": self.fit,
            "problems": self.problems,
            "unjudged": self.unjudged,
            "remarks": self.remarks,
            "strictest_verifier_class": self.strictest.value if self.strictest else None,
            "jobs": self.jobs,
        }


async def check_tasks(
    tasks: list[Task], settings: JobFile, repeats: int, jobs_dir: Path, run_plan: RunPlan
) -> list[TaskReport]:
    """Run oracle and no-op on every task, then find the strictest class. Returns a report per task."""
    reports = {t.name: TaskReport(t.name, remarks=list(t.warnings)) for t in tasks}
    judged = [t for t in tasks if t.solution is not None]
    for task in tasks:
        if task.solution is None:
            reports[task.name].problems.append("no solution/solve.sh: nothing shows that it can be solved")
    oracle = await _job(judged, settings, "oracle", repeats, None, jobs_dir, run_plan)
    idle = await _job(tasks, settings, "no-op", 1, None, jobs_dir, run_plan)
    for task in tasks:
        report = reports[task.name]
        _judge_oracle(report, [r for r in oracle if r.task == task.name])
        _judge_idle(report, [r for r in idle if r.task == task.name])
        _judge_start(report, [r for r in oracle + idle if r.task == task.name])
        report.jobs = sorted({r.job_id for r in oracle + idle if r.task == task.name})
    await _look_at_history(tasks, settings, jobs_dir, run_plan, reports)
    await _find_classes(judged, oracle, settings, jobs_dir, run_plan, reports)
    return list(reports.values())


async def _job(
    tasks: list[Task],
    settings: JobFile,
    agent: str,
    attempts: int,
    verifier_class: VerifierClass | None,
    jobs_dir: Path,
    run_plan: RunPlan,
    **how: object,
) -> list[RolloutRecord]:
    """Run one agent on all tasks; `how` holds its kind and options when it is not a built-in one."""
    if not tasks:
        return []
    job = settings.model_validate(
        settings.model_dump()
        | {
            "name": f"check {agent}",
            "tasks": [str(t.path) for t in tasks],
            "agents": [{"name": agent, **how}],
            "attempts": attempts,
            "verifier_class": verifier_class,
        }
    )
    return (await run_plan(plan_new(job, Path("/"), jobs_dir))).records


NOT_THE_TASKS = (Outcome.INFRA_ERROR, Outcome.PROVIDER_ERROR, Outcome.CANCELLED, Outcome.SKIPPED)


def _told(record: RolloutRecord) -> str:
    return record.outcome.value + (f": {record.cause.message}" if record.cause else "")


def _judge_oracle(report: TaskReport, records: list[RolloutRecord]) -> None:
    for record in records:
        where = f"attempt {record.attempt}: {_told(record)}"
        if record.outcome in NOT_THE_TASKS:
            report.unjudged.append(f"the reference solution could not be tried ({where})")
        elif record.outcome is not Outcome.PASSED:
            report.problems.append(f"the reference solution does not pass ({where})")
    if len({r.outcome for r in records if r.outcome not in NOT_THE_TASKS}) > 1:
        report.problems.append("the reference solution's result differs between repeats: the verifier is flaky")


def _judge_idle(report: TaskReport, records: list[RolloutRecord]) -> None:
    for record in records:
        if record.outcome in NOT_THE_TASKS:
            report.unjudged.append(f"doing nothing could not be tried ({_told(record)})")
        elif record.outcome is Outcome.PASSED:
            report.problems.append("doing nothing passes: the verifier asks for no work")
        elif not record.graded:
            report.problems.append(f"doing nothing was not judged ({_told(record)})")


def _judge_start(report: TaskReport, records: list[RolloutRecord]) -> None:
    """Equal start fingerprints, else the names of the parts that differ."""
    prints = [r.start_fingerprint for r in records if r.start_fingerprint is not None]
    if len({p.digest for p in prints}) > 1:
        parts = sorted(name for name in prints[0].parts if len({repr(p.parts.get(name)) for p in prints}) > 1)
        report.problems.append(
            f"rollouts do not start equal: {', '.join(parts)} differ between repeats "
            "(compare start-files.json in their folders)"
        )


HISTORY_SCAN = "dayfly.history:HistoryScan"


async def _look_at_history(
    tasks: list[Task], settings: JobFile, jobs_dir: Path, run_plan: RunPlan, reports: dict[str, TaskReport]
) -> None:
    if settings.hypervisor == "fake":
        return  # a fake VM has no programs to look with
    for record in await _job(tasks, settings, "history-scan", 1, None, jobs_dir, run_plan, kind=HISTORY_SCAN):
        report = reports[record.task]
        place = JobFolder.open(jobs_dir, record.job_id).rollout_path(record.key)
        found = next((p for p in (place / RESULT_NAME, *place.glob(f"steps/*/{RESULT_NAME}")) if p.exists()), None)
        if found is None or record.outcome in NOT_THE_TASKS:
            report.unjudged.append(f"the history of its repositories could not be read ({_told(record)})")
            continue
        problems, remarks = problems_in(found.read_bytes())
        report.problems += problems
        report.remarks += remarks
        report.jobs.append(record.job_id)


async def _find_classes(
    tasks: list[Task],
    oracle: list[RolloutRecord],
    settings: JobFile,
    jobs_dir: Path,
    run_plan: RunPlan,
    reports: dict[str, TaskReport],
) -> None:
    """From the strictest class down, until the reference solution passes."""
    open_tasks = [t for t in tasks if any(r.task == t.name and r.outcome is Outcome.PASSED for r in oracle)]
    for wanted in reversed(VERIFIER_CLASS_ORDER):
        possible = [t for t in open_tasks if wanted is not VerifierClass.REBOOTED or not t.steps]
        declared = [t for t in open_tasks if t.verifier_class is wanted]
        tried = await _job(
            [t for t in possible if t.verifier_class is not wanted],
            settings,
            "oracle",
            1,
            wanted,
            jobs_dir,
            run_plan,
        )
        passed = {r.task for r in tried if r.outcome is Outcome.PASSED} | {t.name for t in declared}
        for task in [t for t in open_tasks if t.name in passed]:
            report = reports[task.name]
            report.strictest = wanted
            if wanted is not task.verifier_class:
                report.remarks.append(
                    f"declared {task.verifier_class.value}; the reference solution also passes as {wanted.value}"
                )
        open_tasks = [t for t in open_tasks if t.name not in passed]
