"""How often the gate is wrong, by simulation of its whole path: sides, comparison, decision, early stop.

    python benchmarks/gate_errors.py [--pairs 1000] [--json]

A/A: an agent against itself, tasks' chances of passing from a fixed mixture; the share of failed pairs must be at
most alpha. Power: a candidate that is 10 points worse, with as many tasks as `dayfly plan` asks for; at least 80 %
must be failed. Each with one look at the end, and stopped early as `dayfly run --gate` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from dayfly.gate.decide import decide
from dayfly.gate.early_stop import EarlyStopWatch, comparable_tasks, terms_of
from dayfly.gate.planning import POWER, Discordance, prospect
from dayfly.gate.policy import MetricRule, Policy, Require
from dayfly.results.side import MISSING, Side, TaskResults

ALPHA = 0.05
SIZES = (20, 100, 500)
ATTEMPTS = (1, 3)
DROP = 0.1
DISCORDANT = 0.2
MIXTURE = ((0.35, 1.0), (0.15, 0.0), (0.2, 0.9), (0.1, 0.1), (0.2, 0.5))
"""Share of tasks, and their chance of passing: steady ones, rare failures, rare passes, coins."""
Shape = Literal["broken", "spread"]
"""How a candidate is worse: some tasks fail for good, or every task passes less often."""


def _policy(**margins: float) -> Policy:
    metrics = {name: MetricRule(margin=margin) for name, margin in margins.items()}
    return Policy(alpha=ALPHA, metrics=metrics, require=Require(isolation="tcg"))


POLICIES = {
    "margin 0": _policy(score=0.0),
    "margin 2": _policy(score=0.02),
    "three metrics": _policy(score=0.0, reward=0.0, seconds=0.0),
}


# --- sides ---------------------------------------------------------------------------------------


def side(job: str, marks: list[str], seconds: list[float]) -> Side:
    """One agent version's results: a task is its number, its marks and its mean seconds."""
    tasks = {
        f"task-{i:05}": TaskResults(
            task=f"task-{i:05}",
            task_digest=f"sha256:{i}",
            marks=m,
            reward_sum=float(m.count("P")),
            seconds_sum=s * sum(c != MISSING for c in m),
            isolation=("tcg",) if set(m) != {MISSING} else (),
        )
        for i, (m, s) in enumerate(zip(marks, seconds, strict=True))
    }
    graded = sum(len(m) - m.count(MISSING) for m in marks)
    return Side(
        job_id=job,
        job_name="simulated",
        agent="agent",
        agent_digest="sha256:agent",
        agent_kind="command",
        agent_options={},
        attempts=len(marks[0]),
        tasks=tasks,
        digest=f"sha256:{job}",
        job_planned=len(marks) * len(marks[0]),
        job_graded=graded,
    )


def draw(rng: Generator, job: str, chances: np.ndarray, attempts: int, timed: bool) -> Side:
    """`timed`: with seconds, which take a comparison as long as all the rest."""
    passed = rng.random((len(chances), attempts)) < chances[:, None]
    seconds = 10 * timed * np.exp(rng.normal(0.0, 0.3, len(chances)))
    return side(job, ["".join("P" if p else "F" for p in row) for row in passed], seconds.tolist())


def same_chances(rng: Generator, tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a baseline and of a candidate that is no other."""
    shares, values = zip(*MIXTURE, strict=True)
    chances = rng.choice(values, tasks, p=shares)
    return chances, chances


def worse_chances(rng: Generator, tasks: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Chances with a drop of `DROP` on average and `DISCORDANT` pairs that disagree."""
    if shape == "spread":
        # p(1 − p + DROP) + (1 − p)(p − DROP) = DISCORDANT
        b = 1 + DROP
        p = (b + np.sqrt(b * b - 2 * (DROP + DISCORDANT))) / 2
        return np.full(tasks, p), np.full(tasks, p - DROP)
    kind = rng.choice(3, tasks, p=[DROP, flaky := 2 * (DISCORDANT - DROP), 1 - DROP - flaky])
    base = np.select([kind == 0, kind == 1], [1.0, 0.5], 1.0)
    return base, np.where(kind == 0, 0.0, base)


# --- one pair, judged ----------------------------------------------------------------------------


def judge(policy: Policy, base: Side, candidate: Side, watched: bool, seed: int) -> str:
    """The gate's verdict, after an early stop if it comes to one; `fail early` when that decided."""
    if not watched:
        return decide(policy, candidate, base, policy_digest="sha256:policy").verdict
    verdict = decide(policy, stop_early(policy, base, candidate, seed), base, policy_digest="sha256:policy")
    return f"{verdict.verdict} early" if verdict.early_stop is not None else verdict.verdict


def stop_early(policy: Policy, base: Side, candidate: Side, seed: int) -> Side:
    """What a job with this gate would have on file in the end, had it met these results."""
    terms = terms_of(policy, "sha256:policy", base, candidate.agent, seed)
    blank = {n: replace(t, marks=MISSING * t.planned, isolation=()) for n, t in candidate.tasks.items()}
    watch = EarlyStopWatch(terms, policy, base, comparable_tasks(policy, base, blank))
    done: set[str] = set()
    for name in watch.order:
        done.add(name)
        for attempt, mark in enumerate(candidate.tasks[name].marks, 1):
            watch.add(name, attempt, mark)
        if watch.stopped is not None:
            break
    tasks = {n: t if n in done else blank[n] for n, t in candidate.tasks.items()}
    graded = sum(t.graded for t in tasks.values())
    return replace(candidate, tasks=tasks, early_stop=terms.model_dump(mode="json"), job_graded=graded)


# --- many pairs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    tasks: int
    attempts: int
    policy: str
    watched: bool
    pairs: int
    shape: Shape | None = None
    """How the candidate is worse; None: it is no other than the baseline."""


@dataclass(frozen=True)
class Result:
    cell: Cell
    failed: float
    answers: dict[str, int]


def simulate(cell: Cell) -> Result:
    answers: Counter[str] = Counter()
    for number in range(cell.pairs):
        rng = np.random.default_rng([cell.tasks, cell.attempts, number])
        shape = cell.shape
        chances = same_chances(rng, cell.tasks) if shape is None else worse_chances(rng, cell.tasks, shape)
        timed = "seconds" in POLICIES[cell.policy].metrics
        base = draw(rng, "base", chances[0], cell.attempts, timed)
        candidate = draw(rng, "candidate", chances[1], cell.attempts, timed)
        answers[judge(POLICIES[cell.policy], base, candidate, cell.watched, number)] += 1
    failed = answers["fail"] + answers["fail early"]
    return Result(cell, failed / cell.pairs, dict(sorted(answers.items())))


def identical_cells(pairs: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Cell]:
    for policy in POLICIES:
        for tasks in sizes if policy != "three metrics" else sizes[1:2]:
            for attempts in ATTEMPTS:
                for watched in (False, True):
                    yield Cell(tasks, attempts, policy, watched, pairs)


def worse_cells(pairs: int) -> Iterator[Cell]:
    """With as many tasks as the plan asks for."""
    for policy in ("margin 0", "margin 2"):
        for attempts in ATTEMPTS:
            for watched in (False, True):
                tasks = planned_tasks(POLICIES[policy], attempts, watched)
                for shape in ("broken", "spread"):
                    yield Cell(tasks, attempts, policy, watched, pairs, shape)


def planned_tasks(policy: Policy, attempts: int, watched: bool) -> int:
    seen = prospect(
        100,
        attempts,
        Discordance(share=DISCORDANT, source="given"),
        alpha=policy.alpha,
        margin=policy.metrics["score"].margin,
        drop=DROP,
        alpha_share=policy.early_stop.alpha_share,
    )
    figures = seen.watched if watched else seen.at_end
    assert figures is not None and figures.to_find_drop.tasks is not None
    return figures.to_find_drop.tasks


def run(cells: list[Cell]) -> list[Result]:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(simulate, cells))


# --- the table -----------------------------------------------------------------------------------


def show(results: list[Result], bound: str) -> None:
    print(f"{'tasks':>6} {'attempts':>8}  {'policy':14} {'looks':12} {'candidate':10} {'failed':>7}  {bound}")
    for r in results:
        c = r.cell
        looks = "early stop" if c.watched else "at the end"
        answers = ", ".join(f"{n} {a}" for a, n in r.answers.items())
        print(
            f"{c.tasks:>6} {c.attempts:>8}  {c.policy:14} {looks:12} {c.shape or 'the same':10} "
            f"{100 * r.failed:6.1f}%  {answers}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    results = run([*identical_cells(args.pairs), *worse_cells(args.pairs)])
    same = [r for r in results if r.cell.shape is None]
    worse = [r for r in results if r.cell.shape is not None]
    answer: dict[str, Any] = {
        "alpha": ALPHA,
        "pairs": args.pairs,
        "highest_false_alarm": max(r.failed for r in same),
        "lowest_power": min(r.failed for r in worse),
        "seconds": time.monotonic() - started,
        "rows": [asdict(r) for r in results],
    }
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        show(same, f"failed at most {100 * ALPHA:g} %")
        show(worse, f"failed at least {100 * POWER:g} %")
        print(
            f"highest false alarm {100 * answer['highest_false_alarm']:.1f} %, lowest power "
            f"{100 * answer['lowest_power']:.1f} %, {answer['seconds']:.0f} s"
        )
    return 0 if answer["highest_false_alarm"] <= ALPHA and answer["lowest_power"] >= POWER else 1


if __name__ == "__main__":
    sys.exit(main())
