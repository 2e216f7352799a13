"""What a job's rollouts say: pure functions from records to figures, and figures to text.

The score of an agent is the mean over tasks of the task's pass rate over its graded attempts. It always
stands beside its coverage (graded ÷ planned). Timeouts and errors of the agent are graded by their verdict;
faults that are not the agent's are in the coverage, never in the score.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Literal

from dayfly.model import Frozen, Isolation, Outcome, RolloutRecord, VerifierClass
from dayfly.stats import pass_all_k, pass_at_k, standard_error, wilson

CONFIDENCE = 0.95


class Interval(Frozen):
    """A two-sided confidence interval of a score."""

    low: float
    high: float
    method: Literal["wilson", "t"]
    over: Literal["tasks", "attempts"]
    """What was sampled; `attempts` when there is one task: it then says nothing about other tasks."""
    confidence: float = CONFIDENCE


class AgentSummary(Frozen):
    """One agent's figures, or (in `JobSummary.total`) those of all agents together. None: not available."""

    agent: str
    planned: int
    recorded: int
    graded: int
    coverage: float
    """graded ÷ planned; 0 when nothing was planned."""
    counts: dict[Outcome, int]
    tasks: int
    """Tasks with a record."""
    tasks_graded: int
    score: float | None = None
    interval: Interval | None = None
    mean_reward: float | None = None
    """As the score, of the reward; a graded rollout without a verdict has 0."""
    pass_at: dict[int, float | None] = {}
    """k → chance that at least one of k attempts passes."""
    pass_all: dict[int, float | None] = {}
    """k → chance that all of k attempts pass (pass^k)."""
    flaky: tuple[str, ...] = ()
    """Tasks whose graded attempts disagree."""
    median_s: float | None = None
    p95_s: float | None = None
    total_s: float = 0.0
    """Sum over rollouts, in seconds."""
    cost_usd: float | None = None
    """None when it is unknown for any of them."""


class JobSummary(Frozen):
    total: AgentSummary
    """All agents; a score only when there is one agent."""
    agents: tuple[AgentSummary, ...]
    isolation: tuple[Isolation, ...]
    verifier_classes: tuple[VerifierClass, ...]
    elapsed_s: float
    """From the first start to the last end, in seconds."""
    min_coverage: float = 0.0

    @property
    def inconclusive(self) -> bool:
        """Coverage under the floor: no score is given."""
        return self.total.coverage < self.min_coverage


def summarise(
    planned: int | Mapping[str, int],
    records: Iterable[RolloutRecord],
    *,
    min_coverage: float = 0.0,
    clusters: Mapping[str, str] | None = None,
) -> JobSummary:
    """The figures of a job.

    `planned` counts rollouts, in all (shared evenly by the agents) or by agent. `records` are the results of
    the attempts; of two for one attempt the graded, then the later one counts. Under `min_coverage` an agent
    gets no score. `clusters` names the group of a task (its repository), for the interval.
    """
    results = _one_per_attempt(records)
    by_agent: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in results:
        by_agent[record.agent].append(record)
    shares = planned if isinstance(planned, Mapping) else dict.fromkeys(by_agent, planned // max(1, len(by_agent)))
    names = sorted({*by_agent, *shares})
    agents = tuple(
        _summarise(name, shares.get(name, 0), by_agent[name], min_coverage, clusters or {}) for name in names
    )
    in_all = sum(planned.values()) if isinstance(planned, Mapping) else planned
    return JobSummary(
        total=_total(in_all, results, agents),
        agents=agents,
        isolation=tuple(sorted({r.isolation for r in results if r.isolation})),
        verifier_classes=tuple(sorted({r.verifier_class for r in results})),
        elapsed_s=max((r.finished_unix for r in results), default=0.0)
        - min((r.started_unix for r in results), default=0.0),
        min_coverage=min_coverage,
    )


def _one_per_attempt(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """A retry counts once with its attempt."""
    best: dict[tuple[str, str, int], RolloutRecord] = {}
    for record in sorted(records, key=lambda r: (r.graded, r.started_unix)):
        best[record.task, record.agent, record.attempt] = record
    return sorted(best.values(), key=lambda r: (r.agent, r.task, r.attempt))


def _summarise(
    agent: str,
    planned: int,
    results: Sequence[RolloutRecord],
    min_coverage: float,
    clusters: Mapping[str, str],
) -> AgentSummary:
    counted = _count(agent, planned, results)
    if not counted.graded or counted.coverage < min_coverage:
        return counted
    passes: dict[str, list[bool]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    for record in results:
        if record.graded:
            passes[record.task].append(record.passes)
            rewards[record.task].append(record.reward or 0.0)
    trials = {task: (len(p), sum(p)) for task, p in passes.items()}
    every = [trials.get(task, (0, 0)) for task in {r.task for r in results}]
    ks = sorted({1, max(r.attempt for r in results)})
    return counted.model_copy(
        update={
            "score": fmean(c / n for n, c in trials.values()),
            "interval": score_interval(trials, clusters),
            "mean_reward": fmean(fmean(values) for values in rewards.values()),
            "pass_at": {k: pass_at_k(every, k) for k in ks},
            "pass_all": {k: pass_all_k(every, k) for k in ks},
            "flaky": tuple(sorted(task for task, (n, c) in trials.items() if 0 < c < n)),
        }
    )


def _count(agent: str, planned: int, results: Sequence[RolloutRecord]) -> AgentSummary:
    graded = [r for r in results if r.graded]
    seconds = sorted(r.finished_unix - r.started_unix for r in results)
    costs = [r.usage.cost_usd for r in results]
    planned = max(planned, len(results))
    return AgentSummary(
        agent=agent,
        planned=planned,
        recorded=len(results),
        graded=len(graded),
        coverage=len(graded) / planned if planned else 0.0,
        counts={o: n for o in Outcome if (n := Counter(r.outcome for r in results)[o])},
        tasks=len({r.task for r in results}),
        tasks_graded=len({r.task for r in graded}),
        median_s=median(seconds) if seconds else None,
        p95_s=seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        total_s=math.fsum(seconds),
        cost_usd=math.fsum(c for c in costs if c is not None) if costs and None not in costs else None,
    )


def _total(planned: int, results: Sequence[RolloutRecord], agents: Sequence[AgentSummary]) -> AgentSummary:
    if len(agents) == 1:
        return agents[0].model_copy(update={"agent": "total"})
    return _count("total", planned, results)


# --- statistics ----------------------------------------------------------------------------------


def score_interval(
    trials: Mapping[str, tuple[int, int]], clusters: Mapping[str, str] | None = None
) -> Interval | None:
    """The interval of a score; `trials`: task → (graded attempts, passed). None without tasks.

    One attempt per task: Wilson. Several: t over the tasks' means (over clusters, where given). Where these
    means do not vary, t would claim certainty, so Wilson over the number of tasks stands in. One task: Wilson
    over its attempts.
    """
    if not trials:
        return None
    means = {task: c / n for task, (n, c) in trials.items()}
    score = fmean(means.values())
    if len(trials) == 1:
        n = next(iter(trials.values()))[0]
        return _wilson_interval(score, n, "attempts" if n > 1 else "tasks")
    groups = [("cluster", clusters[t]) if clusters and t in clusters else ("task", t) for t in means]
    error, freedom = standard_error(list(means.values()), groups), len(set(groups)) - 1
    single = all(n == 1 for n, _ in trials.values()) and not clusters
    if single or freedom < 1 or error < 1e-12:
        return _wilson_interval(score, len(trials), "tasks")
    from scipy.special import stdtrit  # of scipy.stats, only this is needed, and it is much quicker to import

    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    return Interval(low=max(0.0, score - half), high=min(1.0, score + half), method="t", over="tasks")


def _wilson_interval(rate: float, n: int, over: Literal["tasks", "attempts"]) -> Interval:
    low, high = wilson(rate, n)
    return Interval(low=low, high=high, method="wilson", over=over)


# --- text ----------------------------------------------------------------------------------------

HEADER = ("agent", "score", "95 % interval", "coverage", "outcomes", "median", "p95", "total")


def rows(summary: JobSummary) -> list[tuple[str, ...]]:
    """A row of text per agent under `HEADER`, and one in all when there are several."""
    listed = [*summary.agents, *([summary.total] if len(summary.agents) != 1 else [])]
    return [_row(agent, summary.min_coverage) for agent in listed]


def _row(agent: AgentSummary, min_coverage: float) -> tuple[str, ...]:
    score = "–" if agent.score is None else f"{agent.score:.3f}"
    if agent.coverage < min_coverage:
        score = "inconclusive"
    interval = "–" if agent.interval is None else f"{agent.interval.low:.3f} to {agent.interval.high:.3f}"
    return (
        agent.agent,
        score,
        interval,
        f"{agent.graded}/{agent.planned} ({_percent(agent.coverage)})",
        ", ".join(f"{n} {o.value}" for o, n in agent.counts.items()) or "–",
        format_seconds(agent.median_s),
        format_seconds(agent.p95_s),
        format_seconds(agent.total_s),
    )


def _percent(share: float) -> str:
    """Rounded down, so that 100 % means all of them."""
    return f"{math.floor(share * 100 + 1e-9)} %"


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def render_text(summary: JobSummary) -> str:
    """A table of aligned columns, and the facts that hold for the whole job."""
    table = [HEADER, *rows(summary)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, *facts(summary)]) + "\n"


def render_markdown(summary: JobSummary) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    table = [line(HEADER), line("---" for _ in HEADER), *(line(row) for row in rows(summary))]
    return "\n".join([*table, "", *(f"- {fact}" for fact in facts(summary))]) + "\n"


def facts(summary: JobSummary) -> list[str]:
    """What holds for the whole job, a line each."""
    said = [f"isolation: {', '.join(summary.isolation) or 'unknown'}"]
    said[0] += f"; verifier class: {', '.join(summary.verifier_classes) or 'unknown'}"
    said[0] += f"; elapsed: {format_seconds(summary.elapsed_s)}"
    for agent in summary.agents:
        for k, chance in agent.pass_at.items():
            if k > 1:
                both = (chance, agent.pass_all[k])
                at, all_of = ("not available" if c is None else f"{c:.3f}" for c in both)
                said.append(f"{agent.agent}: pass@{k} {at}, pass^{k} {all_of}")
        if agent.flaky:
            said.append(f"{agent.agent}: attempts disagree on {', '.join(agent.flaky)}")
    return said
