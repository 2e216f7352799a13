"""What a comparison of so many tasks and attempts can show, before it is run. Pure functions.

Assumptions, all of them printed by `dayfly plan`:

- Of all pairs of one attempt each, a share π is discordant: one passes, the other fails. It is estimated from how
  the baseline's own attempts disagree, which is what an identical agent would show; a drop then comes on top of it.
  Where there is nothing to estimate it from, 20 % is assumed, the drop included.
- A drop by δ is δ of the tasks failing for good; the rest of π are flakes, even in both directions. Attempts
  average flakes out, not the choice of the tasks: the variance of a task's difference is (π − δ)/k + δ − δ².
  That is the worst case for attempts: of a drop that is spread over all tasks, they show more.
- Tasks are independent of each other (no clusters), and every rollout is graded. How many tasks it takes has a
  reserve of one in twenty, which may be lost or turn out not to be comparable.

One attempt each: exact, by going through all numbers of regressions and improvements, with the very tests of the
gate. Several, or thousands of tasks: by the noncentral t distribution, and for passing also by the score interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from dayfly.gate.early_stop import Evidence
from dayfly.gate.policy import Policy
from dayfly.model import Frozen
from dayfly.results.side import Side, TaskResults

POWER = 0.8
"""The chance that is asked for."""
DROP = 0.1
"""The drop that is to be found, unless somebody names one."""
ASSUMED = 0.2
"""Share of discordant pairs where nothing is known."""
RESERVE = 0.05
"""Of the tasks asked for; as many as a policy's default floors let be lost."""
EXACT_UP_TO = 2000
"""Tasks; above, exact and t are the same to three digits."""
MOST_TASKS = 1_000_000
MOST_ATTEMPTS = 100
MOST_IN_A_ROW = 10_000

Source = Literal["baseline", "given", "assumed"]


class Discordance(Frozen):
    """How often two rollouts of a task, one of each agent, disagree."""

    share: float
    source: Source
    tasks: int = 0
    """Of the baseline, that it was estimated from."""

    def at(self, drop: float) -> float:
        """The share of discordant pairs when the candidate is worse by `drop`."""
        return min(1.0, self.share + drop) if self.source == "baseline" else max(self.share, drop)


class Needed(Frozen):
    """What it would take. None: more than a million tasks, or than a hundred attempts."""

    tasks: int | None
    """At the attempts planned."""
    rollouts: int | None
    """Of the candidate, with so many tasks."""
    attempts: int | None
    """At the tasks planned; None also when no number of attempts is enough."""


class Figures(Frozen):
    """What one final test at `alpha` can do."""

    alpha: float
    power: float
    """The chance that a candidate worse by the drop asked for is failed."""
    smallest_drop: float | None
    """What is found with a chance of 80 %; None: nothing is."""
    to_find_drop: Needed
    identical_passes: float
    """The chance that an identical candidate is shown to be within the margin."""
    to_pass: Needed | None
    """For a chance of 80 % that an identical candidate passes; None without a margin above 0."""
    least_regressions: int | None
    """So many regressions and no improvement block, fewer never do; None: not with these tasks."""


class Prospect(Frozen):
    """The answer of `dayfly plan`."""

    schema_version: Literal[1] = 1
    tasks: int
    attempts: int
    rollouts: int
    margin: float
    drop: float
    discordance: Discordance
    at_end: Figures
    """One look, when all is done."""
    watched: Figures | None = None
    """With `run --gate`: what is left of the error for the final test. Stopping early adds to its power."""
    resolution: float | None
    """The smallest drop that is told from none, with a chance of 80 %, in the final test; None: no drop is.

    A margin under it asks for more than these rollouts can show.
    """
    least_regressions_early: int | None = None
    """In a row, to be stopped early."""
    warnings: tuple[str, ...] = ()


# --- how noisy is it? ----------------------------------------------------------------------------


def discordance(base: Iterable[TaskResults], given: float | None = None) -> Discordance:
    """What to reckon with: what was said, else what the baseline's own attempts show, else 20 %.

    Within a task of n graded attempts, c passed, two of them disagree in 2c(n − c)/(n(n − 1)) of the cases.
    """
    if given is not None:
        return Discordance(share=given, source="given")
    shares = [_disagreement(t) for t in base if t.graded >= 2]
    if not shares:
        return Discordance(share=ASSUMED, source="assumed")
    # None seen is not none there: at least half a task's worth.
    share = max(math.fsum(shares) / len(shares), 0.5 / len(shares))
    return Discordance(share=min(share, 0.5), source="baseline", tasks=len(shares))


def _disagreement(task: TaskResults) -> float:
    n, c = task.graded, task.passed
    return 2 * c * (n - c) / (n * (n - 1))


# --- power ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """What the gate's final test of the score is given."""

    attempts: int
    noise: Discordance
    alpha: float
    margin: float

    def power(self, tasks: int, drop: float, attempts: int | None = None) -> float:
        """The chance that a candidate worse by `drop` is failed."""
        k = attempts or self.attempts
        both = self.noise.at(drop)
        if k == 1 and tasks <= EXACT_UP_TO:
            return _share(tasks, (both + drop) / 2, (both - drop) / 2, self.fails, at_least=True)
        flakes = max(both - drop, 0.0)
        return _t_power(tasks, drop - self.margin, flakes / k + drop * (1 - drop), self.alpha)

    def passes(self, tasks: int, attempts: int | None = None) -> float:
        """The chance that an identical candidate passes."""
        k = attempts or self.attempts
        share = self.noise.at(0.0)
        if k == 1 and tasks <= EXACT_UP_TO:
            return _share(tasks, share / 2, share / 2, self._holds, at_least=False)
        return min(_t_power(tasks, self.margin, share / k, self.alpha), self._score_passes(tasks, share, k))

    def _score_passes(self, tasks: int, share: float, attempts: int) -> float:
        """The same by the gate's other interval, Tango's on shares, which is the wider one where few tasks flake.

        Steps as in `stats.paired`, with a flake taken to be one attempt: of `tasks` a share has a difference of
        1/attempts, even in both directions.
        """
        from scipy.special import ndtr

        from dayfly.stats import tango

        squares, sums, unseen = share / attempts / tasks, share, 1 / tasks
        step = (squares + unseen**2) / (sums + unseen)
        reach = -tango(sums / 2 / step, sums / 2 / step, 1 / step, self.alpha)[0]
        spread = math.sqrt(squares)
        return float(self.margin >= reach) if not spread else float(ndtr((self.margin - reach) / spread))

    def fails(self, worse: int, better: int, n: int) -> bool:
        """Whether so many regressions and improvements in `n` pairs are a failed gate."""
        from dayfly.stats import mcnemar_exact, tango_p

        if worse <= better or mcnemar_exact(worse, better) > self.alpha:
            return False
        return bool(tango_p(worse, better, n, -self.margin) <= self.alpha)

    def _holds(self, worse: int, better: int, n: int) -> bool:
        from dayfly.stats import tango

        return bool(tango(worse, better, n, self.alpha)[0] >= -self.margin)


def _share(n: int, worse: float, better: float, holds: Callable[[int, int, int], bool], *, at_least: bool) -> float:
    """The chance of numbers of regressions and improvements in `n` pairs for which `holds` is true.

    For each number of improvements it holds from some number of regressions on (`at_least`), or up to one; that
    bound only rises, so one walk finds all of them.
    """
    from scipy.special import bdtr

    reach = 8 * math.sqrt(n * better * (1 - better)) + 8
    first, last = max(0, math.floor(n * better - reach)), min(n, math.ceil(n * better + reach))
    bound = _turn(lambda b: holds(b, first, n) == at_least, n - first)
    p = min(1.0, worse / (1 - better)) if better < 1 else 0.0
    total = 0.0
    for gains in range(first, last + 1):
        rest = n - gains
        while bound <= rest and holds(bound, gains, n) != at_least:
            bound += 1
        below = 0.0 if bound == 0 else 1.0 if bound > rest else float(bdtr(bound - 1, rest, p))
        total += _binomial(n, gains, better) * (1 - below if at_least else below)
    return min(total, 1.0)


def _turn(turned: Callable[[int], bool], most: int) -> int:
    """The first number from 0 on for which `turned` is true, if it then stays so; most + 1: for none."""
    low, high = 0, most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if turned(middle) else (middle + 1, high)
    return low


def _binomial(n: int, k: int, p: float) -> float:
    if p <= 0 or p >= 1:
        return float(k == (0 if p <= 0 else n))
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))


def _t_power(tasks: int, distance: float, variance: float, alpha: float) -> float:
    """The chance that a one-sided t test over `tasks` differences shows them to be on this side of a bound."""
    from scipy.special import nctdtr, stdtrit

    if tasks < 2:
        return 0.0
    if variance <= 0:
        return float(distance > 0)
    shift = distance * math.sqrt(tasks / variance)
    critical = float(stdtrit(tasks - 1, 1 - alpha))
    if shift - critical > 8:  # where nctdtr has no digits left
        return 1.0
    return 1 - float(nctdtr(tasks - 1, shift, critical))


# --- what it takes -------------------------------------------------------------------------------


def figures(design: Design, tasks: int, drop: float) -> Figures:
    return Figures(
        alpha=design.alpha,
        power=design.power(tasks, drop),
        smallest_drop=smallest_drop(design, tasks),
        to_find_drop=_needed(design, tasks, lambda n, k: design.power(n, drop, k)),
        identical_passes=design.passes(tasks),
        to_pass=_needed(design, tasks, design.passes) if design.margin > 0 else None,
        least_regressions=next((b for b in range(1, tasks + 1) if design.fails(b, 0, tasks)), None),
    )


def _needed(design: Design, tasks: int, chance: Callable[[int, int], float]) -> Needed:
    graded = _first(lambda n: chance(n, design.attempts) >= POWER, MOST_TASKS)
    wanted = None if graded is None else math.ceil(graded / (1 - RESERVE))
    attempts = _first(lambda k: chance(tasks, k) >= POWER, MOST_ATTEMPTS)
    return Needed(tasks=wanted, rollouts=None if wanted is None else wanted * design.attempts, attempts=attempts)


def _first(enough: Callable[[int], bool], most: int) -> int | None:
    """The first number that is enough, if more are always enough, too; None: none up to `most`."""
    high = 1
    while not enough(high):
        if high >= most:
            return None
        high = min(high * 2, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def smallest_drop(design: Design, tasks: int) -> float | None:
    """The drop that is found with a chance of 80 %, to a tenth of a point; None: not even the largest is."""
    if design.power(tasks, 1.0) < POWER:
        return None
    found = _first(lambda tenths: design.power(tasks, min(tenths / 1000, 1.0)) >= POWER, 1000)
    return None if found is None else found / 1000


# --- the answer ----------------------------------------------------------------------------------


def prospect(
    tasks: int,
    attempts: int,
    noise: Discordance,
    *,
    alpha: float = 0.05,
    margin: float | None = None,
    drop: float | None = None,
    alpha_share: float | None = None,
) -> Prospect:
    """What `tasks` comparable tasks with `attempts` each can show.

    `margin`: None when no policy names one; it is taken as 0 then. `alpha_share`: of alpha, what `run --gate`
    spends on looking early; None: there is no gate.
    """
    let_through = margin or 0.0
    wanted = drop if drop is not None else max(DROP, 2 * let_through)
    at_end = figures(Design(attempts, noise, alpha, let_through), tasks, wanted)
    watched, early = None, None
    if alpha_share is not None:
        watched = figures(Design(attempts, noise, alpha * (1 - alpha_share), let_through), tasks, wanted)
        early = _least_in_a_row(alpha * alpha_share, let_through)
    last = watched or at_end
    resolution = smallest_drop(Design(attempts, noise, last.alpha, 0.0), tasks)
    return Prospect(
        tasks=tasks,
        attempts=attempts,
        rollouts=tasks * attempts,
        margin=let_through,
        drop=wanted,
        discordance=noise,
        at_end=at_end,
        watched=watched,
        least_regressions_early=early if early is not None and early <= tasks else None,
        resolution=resolution,
        warnings=tuple(_warnings(tasks, margin, resolution, last)),
    )


def prospect_of_gate(
    policy: Policy, base: Side, comparable: Collection[str], attempts: int, drop: float | None = None
) -> Prospect:
    """What a job can show that `run --gate` looks at. Attempts that only one side has pair with nothing."""
    rule = policy.metrics.get("score")
    return prospect(
        len(comparable),
        min(attempts, base.attempts),
        discordance(base.tasks[name] for name in comparable),
        alpha=policy.alpha,
        margin=None if rule is None else rule.margin,
        drop=drop,
        alpha_share=policy.early_stop.alpha_share,
    )


def _least_in_a_row(alpha: float, margin: float) -> int:
    """Whole losses from the first task on that block; see `early_stop.Evidence`."""
    evidence = Evidence(margin)
    while not evidence.blocks(alpha):
        evidence.add([-1.0])
        if evidence.pairs > MOST_IN_A_ROW:
            break
    return evidence.pairs


def _warnings(tasks: int, margin: float | None, resolution: float | None, f: Figures) -> Iterable[str]:
    if f.least_regressions is None:
        few = "1 task is" if tasks == 1 else f"{tasks} tasks are"
        yield f"{few} too few to fail any candidate, even if all of them got worse"
    if margin is None or (resolution is not None and margin >= resolution and f.identical_passes >= POWER):
        return
    least = "no drop at all" if resolution is None else f"no drop under {100 * resolution:.1f} points"
    said = (
        f"the margin of {100 * margin:.1f} points is finer than these rollouts can show: {least} is told from none "
        "with a chance of 80 %"
    )
    if f.identical_passes < POWER:
        said += f", and an identical candidate passes with a chance of {100 * f.identical_passes:.0f} %"
    yield said
