"""`dayfly compare` on jobs of the fake hypervisor."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 40
[verifier]
timeout_sec = 25
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
[metadata]
repository = "one"
[dayfly]
verifier_class = "rebooted"
"""
TEST = """\
#!fake
write /logs/verifier/reward.txt 0
expect /app/result.txt done
write /logs/verifier/reward.txt 1
"""
COUNT = 6


Dayfly = Callable[..., Any]
Run = Callable[..., str]


def write_tasks(folder: Path, test: str = TEST) -> None:
    for number in range(COUNT):
        place = folder / f"task-{number}"
        for name, text in (
            ("task.toml", TOML),
            ("instruction.md", "Write `done` into result.txt.\n"),
            ("environment/.keep", ""),
            ("solution/solve.sh", "#!fake\nwrite result.txt done\n"),
            ("tests/test.sh", test),
        ):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
            (place / name).chmod(0o755)


@pytest.fixture
def run(dayfly: Dayfly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Do six tasks on the fake hypervisor; the job's id."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "tasks")

    def start(*agents: str) -> str:
        named = [word for agent in agents for word in ("--agent", agent)]
        done = dayfly("run", "tasks", *named, "--hypervisor", "fake", "--json", "--display", "none")
        assert done.code == 0, done.err
        return str(done.json["id"])

    return start


def test_a_worse_agent_is_shown_with_the_command_that_explains_it(dayfly: Dayfly, run: Run) -> None:
    job = run("oracle", "no-op")
    done = dayfly("compare", f"{job}:oracle", f"{job}:no-op")
    assert done.code == 0, done.err
    assert "6 of 6 tasks can be compared" in done.out
    assert "score: 1 → 0, Δ -1.000 (95 %:" in done.out and "p of no worse 0.0156" in done.out
    assert "pass→fail 6" in done.out and "cost_usd: unknown" in done.out
    next_line = next(line for line in done.out.splitlines() if line.startswith("next: "))
    words = shlex.split(next_line.removeprefix("next: "))
    assert words == ["dayfly", "logs", f"{job}/task-0/no-op/1"]
    assert dayfly(*words[1:]).code == 0


def test_a_job_named_by_its_folder_is_found_by_the_command_too(
    dayfly: Dayfly, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run("oracle", "no-op")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "latest").symlink_to(tmp_path / "jobs" / job)
    monkeypatch.chdir(elsewhere)
    for name in (f"../jobs/{job}", "latest"):
        done = dayfly("compare", f"{name}:oracle", f"{name}:no-op")
        assert done.code == 0, done.err
        next_line = next(line for line in done.out.splitlines() if line.startswith("next: "))
        assert dayfly(*shlex.split(next_line.removeprefix("next: "))[1:]).code == 0


def test_reports_are_for_whom_the_umask_says_and_follow_links(dayfly: Dayfly, run: Run, tmp_path: Path) -> None:
    job = run("oracle", "no-op")
    (tmp_path / "real.md").write_text("old")
    (tmp_path / "real.md").chmod(0o640)
    (tmp_path / "link.md").symlink_to("real.md")
    before = os.umask(0o022)
    try:
        words = ("--markdown", "link.md", "--html", "new/page.html")
        assert dayfly("compare", f"{job}:oracle", f"{job}:no-op", *words).code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "link.md").is_symlink() and "## Comparison" in (tmp_path / "real.md").read_text()
    assert (tmp_path / "real.md").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new/page.html").stat().st_mode & 0o777 == 0o644
    done = dayfly("compare", f"{job}:oracle", f"{job}:no-op", "--markdown", "new", "--html", "/dev/null")
    assert done.code == 4 and "writing new" in done.err and "pass→fail 6" in done.out
    assert Path("/dev/null").is_char_device()


def test_the_same_agent_twice_differs_in_nothing_but_the_job(dayfly: Dayfly, run: Run) -> None:
    done = dayfly("compare", run("oracle"), run("oracle"), "--json")
    (one,) = done.json["comparisons"]
    assert done.code == 0 and one["comparable"] == 6
    assert {"agent", "task", "verifier", "limits", "isolation", "host"} <= set(one["same"])
    assert one["metrics"]["score"]["delta"] == 0 and one["left_out"] == []


def test_more_candidates_are_each_compared_with_the_first(dayfly: Dayfly, run: Run) -> None:
    job = run("oracle", "no-op")
    sides = (f"{job}:oracle", f"{job}:oracle", f"{job}:no-op")
    found = dayfly("compare", *sides, "--json").json["comparisons"]
    assert [c["base"]["agent"] for c in found] == ["oracle", "oracle"]
    assert [c["metrics"]["score"]["delta"] for c in found] == [0, -1]
    lines = dayfly("compare", *sides).out.splitlines()
    assert lines[0].split() == ["candidate", "score"] and lines[2].startswith(f"{job}:no-op")


def test_files_hold_the_same_comparison_and_markdown_can_be_printed(dayfly: Dayfly, run: Run) -> None:
    job = run("oracle", "no-op")
    sides = (f"{job}:oracle", f"{job}:no-op")
    assert dayfly("compare", *sides, "--markdown", "out/c.md", "--html", "out/c.html").code == 0
    page = Path("out/c.md").read_text()
    assert "| score | 1 | 0 | -1 |" in page
    assert "task-0" in Path("out/c.html").read_text()
    assert dayfly("compare", *sides, "--markdown", "-").out == page
    assert dayfly("compare", *sides, "--markdown", "-", "--json").code == 2


def test_nothing_to_compare_is_listed_and_is_no_zero_exit(dayfly: Dayfly, run: Run, tmp_path: Path) -> None:
    """Fault case 59, for who reads the exit code: a changed verifier is not "nothing changed"."""
    before = run("oracle")
    write_tasks(tmp_path / "tasks", TEST + "# another verifier\n")
    done = dayfly("compare", before, run("oracle"))
    assert done.code == 4 and "can be compared with the baseline's" in done.err
    assert "0 of 6 tasks can be compared" in done.out and "left out: 6 verifier changed" in done.out
    assert "score: unknown (no task is comparable)" in done.out


def test_a_record_that_is_not_as_it_was_sealed_is_said(dayfly: Dayfly, run: Run) -> None:
    before, after = run("oracle"), run("oracle")
    record = next(Path("jobs", after).glob("rollouts/*/*/*/rollout.json"))
    record.write_text(record.read_text().replace('"reward"', '"rewarb"', 1))
    done = dayfly("compare", before, after)
    assert done.code == 0 and "not as sealed: " in done.out and "not graded in the candidate" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--allow", "verifier"), "--allow 'verifier'"),
        (("--cluster-by", "repo"), "its tasks have: repository"),
        (("--alpha", "0.9"), "--alpha"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(dayfly: Dayfly, run: Run, words: tuple[str, ...], said: str) -> None:
    job = run("oracle")
    done = dayfly("compare", job, job, *words)
    assert done.code == 2 and said in done.err


def test_clusters_by_a_key_of_the_metadata(dayfly: Dayfly, run: Run) -> None:
    job = run("oracle", "no-op")
    done = dayfly("compare", f"{job}:oracle", f"{job}:no-op", "--cluster-by", "repository", "--json")
    score = done.json["comparisons"][0]["metrics"]["score"]
    assert done.code == 0 and "clusters by repository" in score["method"]
    assert score["low"] == -1 and score["high"] > 0.5 and score["p_worse"] == 0.5, "one cluster shows nothing"
