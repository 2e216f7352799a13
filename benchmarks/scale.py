"""How the controller scales: rollouts on the fake hypervisor, each size in a process of its own.

    python benchmarks/scale.py [--sizes 1000,3000,10000] [--json]

Prints seconds and peak memory for each size, and from the smallest to the largest the growth of the cost per
rollout and the memory that 1,000 more rollouts take. Everything but the VM is real: plan, admission, evidence
with fsync, seal, rename, index.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOML = """\
schema_version = "1.4"
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 128
storage_mb = 64
[dayfly]
verifier_class = "rebooted"
"""
SCRIPTS = {
    "solution/solve.sh": "#!fake\nwrite result.txt done\n",
    "tests/test.sh": "#!fake\nwrite /logs/verifier/reward.txt 0\nexpect /app/result.txt done\n"
    "write /logs/verifier/reward.txt 1\n",
}


def make_task(folder: Path) -> None:
    (folder / "environment").mkdir(parents=True)
    (folder / "task.toml").write_text(TOML)
    (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
    for name, text in SCRIPTS.items():
        path = folder / name
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(0o755)


def one_size(count: int) -> None:
    """In a child: run one job of `count` rollouts; print the figures as JSON."""
    import anyio

    from dayfly.job import parse_job, plan_new, run_job

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tasks = max(1, count // 1000)  # attempts are capped at 1,000 a task
        for number in range(tasks):
            make_task(root / f"tasks/task-{number}")
        job = parse_job(
            {
                "tasks": ["tasks"],
                "agents": ["oracle", "no-op"],
                "attempts": count // 2 // tasks,
                "hypervisor": "fake",
                "concurrency": 32,
                "keep_disk": "never",
            },
            "benchmark",
        )
        started = time.monotonic()
        result = anyio.run(lambda: run_job(plan_new(job, root, root / "jobs")))
        seconds = time.monotonic() - started
    assert len(result.records) == count and all(r.graded for r in result.records)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rollouts": count, "seconds": seconds, "peak_mib": peak_mib}))


def mib_per_1000(rows: list[dict[str, float]]) -> float | None:
    """The slope of peak memory between the smallest and the largest job; None for one size."""
    more = rows[-1]["rollouts"] - rows[0]["rollouts"]
    return (rows[-1]["peak_mib"] - rows[0]["peak_mib"]) / more * 1000 if more else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,3000,10000")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        one_size(args.child)
        return
    rows = []
    for size in (int(s) for s in args.sizes.split(",")):
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(size)], check=True, stdout=subprocess.PIPE, timeout=3000
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    per_1000 = [r["seconds"] / r["rollouts"] * 1000 for r in rows]
    answer = {
        "rows": rows,
        "seconds_per_1000": per_1000,
        "cost_growth": per_1000[-1] / per_1000[0],
        "mib_per_1000": mib_per_1000(rows),
    }
    if args.json:
        print(json.dumps(answer, indent=2))
        return
    for row, cost in zip(rows, per_1000, strict=True):
        line = f"{row['rollouts']:>7} rollouts  {row['seconds']:8.1f} s  {cost:7.2f} s per 1,000"
        print(f"{line}  {row['peak_mib']:6.0f} MiB peak")
    print(f"cost per rollout, largest ÷ smallest: {answer['cost_growth']:.2f}")
    if answer["mib_per_1000"] is not None:
        print(f"memory for 1,000 more rollouts: {answer['mib_per_1000']:.1f} MiB")


if __name__ == "__main__":
    main()
