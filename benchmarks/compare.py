"""What comparing and gating cost: two jobs in the index, then `dayfly compare` and `dayfly gate` as processes.

    python benchmarks/compare.py [--shapes 500x10,5000x100,100000x5] [--runs 3] [--json]

A shape is TASKSxATTEMPTS of each of the two jobs, so 5000x100 is 1,000,000 recorded rollouts. They are made
through the store (`JobFolder.create`, `SqlStore.add_many`) and are no files, as on a host that has only the index.
Prints for each command the median of seconds and the peak memory; `start` is `dayfly --version`, `load` is reading
both sides alone. Then the growth of seconds from the first to the second shape, beside that of rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DAYFLY = [sys.executable, "-m", "dayfly.cli"]
LOAD = "import sys; from pathlib import Path; from dayfly.results import load_side\n" + (
    "for job in ('base', 'candidate'): assert load_side(Path(sys.argv[1]), job).source == 'index'"
)
POLICY = """\
metrics:
  score: {margin: 0.05}
  reward: {margin: 0.05}
  seconds: {margin: 0.2, tier: supporting}
"""


def records(job_id: str, tasks: int, attempts: int) -> Iterator[Any]:
    """Of one agent; every task has its own difficulty, and one rollout in a thousand is lost to a fault."""
    from dayfly.evidence import sha256_bytes
    from dayfly.model import Outcome, RolloutRecord, Usage, Verdict, VerifierClass

    chance = random.Random(f"{tasks}x{attempts}")  # the same difficulties in both jobs
    draw = random.Random(job_id)
    verdicts = {p: Verdict(reward=float(p), passed=p, rewards={"reward": float(p)}) for p in (True, False)}
    first = RolloutRecord(
        rollout_id="",
        job_id=job_id,
        task="",
        task_digest="",
        agent="coder",
        agent_digest=sha256_bytes(job_id.encode()),
        attempt=1,
        outcome=Outcome.PASSED,
        verifier_class=VerifierClass.REBOOTED,
        isolation="kvm",
        started_unix=0.0,
        finished_unix=0.0,
    )
    disk = sha256_bytes(b"disk")
    for number in range(tasks):
        name, ease = f"suite/task-{number:06}", chance.random()
        digest = sha256_bytes(name.encode())
        for attempt in range(1, attempts + 1):
            passed, lost, started = draw.random() < ease, draw.random() < 0.001, 1.7e9 + number
            outcome = Outcome.INFRA_ERROR if lost else Outcome.PASSED if passed else Outcome.FAILED
            yield first.model_copy(
                update={
                    "rollout_id": f"20261202-000000-{number:06}{attempt:04}",
                    "task": name,
                    "task_digest": digest,
                    "attempt": attempt,
                    "outcome": outcome,
                    "verdict": None if lost else verdicts[passed],
                    "reward": None if lost else float(passed),
                    "disk_digest": disk,
                    "started_unix": started,
                    "finished_unix": started + draw.uniform(30, 90),
                    "usage": Usage(tokens_in=draw.randrange(10_000), tokens_out=500, cost_usd=0.01),
                }
            )


def make_job(jobs_dir: Path, job_id: str, tasks: int, attempts: int) -> None:
    from dayfly.evidence import JobFolder, sha256_bytes
    from dayfly.stores import SqlStore

    names = [f"suite/task-{number:06}" for number in range(tasks)]
    locked = {
        name: {
            "digest": sha256_bytes(name.encode()),
            "path": f"/tasks/{name}",
            "image": "image",
            "machine": {"cpus": 1, "memory_mib": 1024, "storage_mib": 4096},
            "verifier_class": "rebooted",
            "agent_limit_s": 3600.0,
            "verifier_timeout_s": 600.0,
            "verifier_digest": sha256_bytes(f"verifier of {name}".encode()),
            "tags": [f"tag-{number % 10}"],
            "metadata": {"repository": f"repository-{number % 50}"},
        }
        for number, name in enumerate(names)
    }
    agent = {"name": "coder", "kind": "command", "options": {"run": "coder"}}
    planned = tasks * attempts
    job = {"name": job_id, "tasks": ["tasks"], "agents": [agent], "attempts": attempts, "seed": 0}
    lock = {
        "schema_version": 1,
        "tasks": locked,
        "agents": {"coder": {"kind": "command", "digest": sha256_bytes(job_id.encode())}},
        "planned": planned,
        "planned_by_agent": {"coder": planned},
    }
    JobFolder.create(jobs_dir, job_id, {"schema_version": 1, "id": job_id, "job": job, "planned": planned}, lock)
    with SqlStore.open(jobs_dir) as store:
        store.add_many(records(job_id, tasks, attempts))


def measured(argv: list[str], accepted: tuple[int, ...]) -> dict[str, float]:
    """Run one process: its seconds and its peak memory."""
    started = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in accepted, (argv, process.returncode)
    return {"seconds": seconds, "peak_mib": usage.ru_maxrss / 1024}


def one_shape(tasks: int, attempts: int, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        jobs_dir, policy = Path(temporary) / "jobs", Path(temporary) / "gate.yaml"
        jobs_dir.mkdir()
        policy.write_text(POLICY)
        started = time.monotonic()
        for job_id in ("base", "candidate"):
            make_job(jobs_dir, job_id, tasks, attempts)
        row: dict[str, Any] = {"tasks": tasks, "attempts": attempts, "rollouts": 2 * tasks * attempts}
        row["making_s"] = time.monotonic() - started
        row["index_mib"] = (jobs_dir / "index.db").stat().st_size / 2**20
        where = ["--jobs-dir", str(jobs_dir)]
        sides = ["--baseline", "base", "--candidate", "candidate"]
        commands = {
            "start": ([*DAYFLY, "--version"], (0,)),
            "load": ([sys.executable, "-c", LOAD, str(jobs_dir)], (0,)),
            "compare": ([*DAYFLY, "compare", "base", "candidate", "--json", *where], (0,)),
            "gate": ([*DAYFLY, "gate", *sides, "--policy", str(policy), "--json", *where], (0, 1, 3)),
        }
        for name, (argv, accepted) in commands.items():
            seen = [measured(argv, accepted) for _ in range(runs)]
            row[name] = {
                "seconds": statistics.median(s["seconds"] for s in seen),
                "peak_mib": max(s["peak_mib"] for s in seen),
            }
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="500x10,5000x100,100000x5")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")]
    rows = [one_shape(tasks, attempts, args.runs) for tasks, attempts in shapes]
    answer: dict[str, Any] = {"rows": rows}
    if len(rows) > 1:
        answer["rollouts_growth"] = rows[1]["rollouts"] / rows[0]["rollouts"]
        answer |= {f"{n}_growth": rows[1][n]["seconds"] / rows[0][n]["seconds"] for n in ("compare", "gate")}
    if args.json:
        print(json.dumps(answer, indent=2))
        return
    for row in rows:
        print(f"{row['rollouts']:>9,} rollouts: {row['tasks']:,} tasks x {row['attempts']} attempts, two jobs")
        for name in ("start", "load", "compare", "gate"):
            print(f"  {name:8} {row[name]['seconds']:7.2f} s  {row[name]['peak_mib']:6.0f} MiB peak")
    for name in ("compare", "gate"):
        if (growth := answer.get(f"{name}_growth")) is not None:
            print(f"{name}: {answer['rollouts_growth']:.0f} times the rollouts, {growth:.1f} times the seconds")


if __name__ == "__main__":
    main()
