"""Canned attacks on the verdict, against the demo tasks, in each verifier class.

An attack may end in any way but `passed`: never in `separate`, and in `rebooted` not for those that need a
process, a planted file or the channel. What ends as passed in the weaker classes is printed as a table: it is
what one gets when one chooses that class. The oracle passes in all of them, so no barrier stops honest work.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from dayfly.job import parse_job, plan_new, run_job
from dayfly.model import GRADED, Disk, Outcome, RolloutRecord, VerifierClass

pytestmark = pytest.mark.vm

AGENTS = Path(__file__).parent / "agents"
TASKS = Path(__file__).parents[2] / "examples" / "demo" / "tasks"


@dataclass(frozen=True)
class Attack:
    number: int
    name: str
    task: str
    script: str
    arguments: tuple[str, ...] = ()
    passes_weak: bool = False
    """It gets a pass from a verifier that is written without care."""


ATTACKS = (
    Attack(1, "reads-answers", "query-sqlite", "read-answers.sh"),
    Attack(7, "conftest-hook", "fix-failing-test", "conftest-hook.sh", passes_weak=True),
    Attack(9, "weakens-tests", "fix-failing-test", "weaken-tests.sh", passes_weak=True),
    Attack(10, "skips-tests", "fix-failing-test", "skip-tests.sh", passes_weak=True),
    Attack(17, "path-trojan", "fix-failing-test", "path-trojan.sh", passes_weak=True),
    Attack(17, "replaces-python", "query-sqlite", "replace-python.sh"),
    Attack(19, "plants-reward", "query-sqlite", "plant-reward.sh"),
    Attack(20, "rewrite-daemon", "query-sqlite", "rewrite-daemon.sh"),
    Attack(23, "overwrites-expected", "query-sqlite", "overwrite-expected.sh"),
    Attack(26, "opens-verdict-port", "query-sqlite", "open-port.py"),
    Attack(28, "sends-garbage", "query-sqlite", "open-port.py", ("garbage",)),
)
BY_PROCESS_OR_CHANNEL = {1, 19, 20, 26, 28}
CLASSES = tuple(VerifierClass)

WEAK_TEST = """\
#!/bin/sh
cd /app
if pytest -q; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
"""

Results = dict[str, RolloutRecord]
"""Agent name and, for the oracle, task → how it ended."""


def run_attacks(
    task: Path,
    attacks: list[Attack],
    jobs_dir: Path,
    verifier_class: VerifierClass,
    controls: tuple[str, ...] = ("oracle",),
) -> Results:
    agents: list[dict[str, Any]] = [{"name": name} for name in controls]
    for attack in attacks:
        guest = f"/opt/agent/{attack.script}"
        interpreter = "/usr/bin/python3" if guest.endswith(".py") else "/bin/sh"
        options = {"files": {str(AGENTS / attack.script): guest}, "argv": [interpreter, guest, *attack.arguments]}
        agents.append({"name": attack.name, "kind": "command", "options": options})
    job = {
        "name": f"attacks {task.name} {verifier_class.value}",
        "tasks": [str(task)],
        "agents": agents,
        "verifier_class": verifier_class.value,
        "agent_timeout": 90,
        "keep_disk": "never",
        "retries": 0,
    }
    result = anyio.run(lambda: run_job(plan_new(parse_job(job, "test"), task, jobs_dir)))
    return {record.agent: record for record in result.records}


@pytest.fixture(scope="module")
def results(base_disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Callable[[VerifierClass], Results]:
    """All attacks in one verifier class, run when first asked for."""
    known: dict[VerifierClass, Results] = {}
    jobs_dir = tmp_path_factory.mktemp("jobs")

    def run(verifier_class: VerifierClass) -> Results:
        if verifier_class not in known:
            known[verifier_class] = {}
            for task in sorted({attack.task for attack in ATTACKS}):
                mine = [attack for attack in ATTACKS if attack.task == task]
                ended = run_attacks(TASKS / task, mine, jobs_dir, verifier_class)
                ended[f"oracle {task}"] = ended.pop("oracle")
                known[verifier_class] |= ended
        return known[verifier_class]

    return run


@pytest.mark.parametrize("verifier_class", CLASSES)
@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{a.number}-{a.name}" for a in ATTACKS])
def test_an_attack_gets_no_pass(
    results: Callable[[VerifierClass], Results], attack: Attack, verifier_class: VerifierClass
) -> None:
    record = results(verifier_class)[attack.name]
    strict = verifier_class is VerifierClass.SEPARATE
    if strict or (verifier_class is VerifierClass.REBOOTED and attack.number in BY_PROCESS_OR_CHANNEL):
        assert record.outcome is not Outcome.PASSED
    assert record.outcome in GRADED, f"an attack became {record.outcome.value}: {record.cause}"


@pytest.mark.parametrize("verifier_class", CLASSES)
@pytest.mark.parametrize("task", sorted({attack.task for attack in ATTACKS}))
def test_honest_work_passes(
    results: Callable[[VerifierClass], Results], task: str, verifier_class: VerifierClass
) -> None:
    assert results(verifier_class)[f"oracle {task}"].outcome is Outcome.PASSED


def test_the_table(
    results: Callable[[VerifierClass], Results],
    record_testsuite_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prints which attack ends how in which class; fails only if one is missing."""
    lines = ["| # | attack | task | shared | rebooted | separate |", "|---|---|---|---|---|---|"]
    for attack in ATTACKS:
        ends = [results(verifier_class)[attack.name].outcome.value for verifier_class in CLASSES]
        lines.append(f"| {attack.number} | {attack.name} | {attack.task} | {' | '.join(ends)} |")
        record_testsuite_property(f"attack {attack.number} {attack.name}", ", ".join(ends))
    with capsys.disabled():
        print("\n\n" + "\n".join(lines))
    assert len(lines) == 2 + len(ATTACKS)


def test_the_attacks_are_real(base_disk: Disk, tmp_path: Path) -> None:
    """A verifier without care lets them pass: what stops them above is not that they do nothing."""
    task = tmp_path / "fix-failing-test"
    shutil.copytree(TASKS / task.name, task)
    (task / "tests/test.sh").write_text(WEAK_TEST)
    attacks = [attack for attack in ATTACKS if attack.passes_weak]
    ended = run_attacks(task, attacks, tmp_path / "jobs", VerifierClass.REBOOTED, controls=("oracle", "no-op"))
    assert ended.pop("no-op").outcome is Outcome.FAILED
    assert {name for name, record in ended.items() if record.outcome is not Outcome.PASSED} == set()
