"""`dayfly gate` as a CI uses it, on jobs of the fake hypervisor: one answer in every output, and its exit code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

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
[dayfly]
verifier_class = "rebooted"
"""
TEST = """\
#!fake
write /logs/verifier/reward.txt 0
expect /app/result.txt done
write /logs/verifier/reward.txt 1
"""
COUNT = 12
POLICY = "require: {isolation: fake}\nmetrics:\n  score: {margin: 0.2}\n"
STRICT = POLICY.replace("0.2", "0.05")


Dayfly = Callable[..., Any]


@pytest.fixture
def run(dayfly: Dayfly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Do a dozen tasks on the fake hypervisor, in a folder of their own; the job's id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for number in range(COUNT):
        folder = tmp_path / "tasks" / f"task-{number:02}"
        (folder / "environment").mkdir(parents=True)
        (folder / "task.toml").write_text(TOML)
        (folder / "instruction.md").write_text("Write `done` into result.txt.\n")
        for path, text in (("solution/solve.sh", "#!fake\nwrite result.txt done\n"), ("tests/test.sh", TEST)):
            (folder / path).parent.mkdir()
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)

    def start(agent: str, *more: object) -> str:
        words = ("run", "tasks", "--agent", agent, "--hypervisor", "fake", "--json", "--display", "none")
        done = dayfly(*words, *more)
        assert done.code in (0, 4), done.err
        return str(done.json["id"])

    return start


def policy(text: str) -> Path:
    path = Path("gate.yaml")
    path.write_text(text)
    return path


def lose_results(job: str, count: int) -> None:
    """As if the host had died: so many rollouts were never recorded."""
    for record in sorted(Path("jobs", job).glob("rollouts/*/*/*/rollout.json"))[:count]:
        record.unlink()


def damage(job: str) -> None:
    record = next(Path("jobs", job).glob("rollouts/*/*/*/rollout.json"))
    record.write_text(record.read_text().replace('"reward"', '"rewarb"', 1))


SCENARIOS: list[tuple[str, int, str, str, Callable[[str], None] | None]] = [
    ("pass", 0, "oracle", POLICY, None),
    ("fail", 1, "no-op", POLICY, None),
    ("inconclusive", 3, "oracle", STRICT, None),
    ("inconclusive", 1, "oracle", STRICT + "on_inconclusive: fail\n", None),
    ("inconclusive", 0, "oracle", STRICT + "on_inconclusive: allow\n", None),
    ("invalid", 4, "oracle", POLICY, lambda job: lose_results(job, 10)),
    ("invalid", 4, "no-op", POLICY, damage),
    ("invalid", 4, "oracle", POLICY.replace("fake", "tcg"), None),
]


@pytest.mark.parametrize(("answer", "code", "agent", "text", "then"), SCENARIOS)
def test_every_output_says_the_same(
    dayfly: Dayfly,
    run: Callable[..., str],
    answer: str,
    code: int,
    agent: str,
    text: str,
    then: Callable[[str], None] | None,
) -> None:
    base, candidate = run("oracle"), run(agent)
    if then is not None:
        then(candidate)
    words = ("gate", "--baseline", base, "--candidate", candidate, "--policy", policy(text))
    files = ("--junit", "out.xml", "--summary", "out.md", "--badge", "out.svg")
    plain, document = dayfly(*words, *files), dayfly(*words, "--json")
    assert (plain.code, document.code) == (code, code), plain.out + plain.err
    verdict = document.json
    assert (verdict["verdict"], verdict["exit_code"]) == (answer, code)
    assert f"\n{answer.upper()}: {verdict['reason']}\n" in plain.out
    xml = JUnitXml.fromfile("out.xml")
    assert (xml.failures > 0, xml.errors > 0) == (code == 1, code in (3, 4))
    assert answer in Path("out.md").read_text().lower() and answer in Path("out.svg").read_text().lower()


@pytest.mark.parametrize(("agent", "least", "code"), [("oracle", 0.7, 0), ("oracle", 0.9, 3), ("no-op", 0.7, 1)])
def test_one_job_against_an_absolute_bound(
    dayfly: Dayfly, run: Callable[..., str], agent: str, least: float, code: int
) -> None:
    run(agent)
    text = f"require: {{isolation: fake}}\nmetrics: {{score: {{min: {least}}}}}\n"
    assert dayfly("gate", "last", "-p", policy(text)).code == code


def test_the_command_that_it_names_confirms_a_failure(dayfly: Dayfly, run: Callable[..., str]) -> None:
    candidate = run("no-op")
    words = ("gate", candidate, "-p", policy("require: {isolation: fake}\nmust_pass: [task-03]\n"))
    first = dayfly(*words, "--json")
    assert (first.code, first.json["decided_by"]) == (3, "must_pass")
    named = re.search(r"`dayfly (run JOBFILE [^`]*)`", first.json["reason"])
    assert named is not None, first.json["reason"]
    command = shlex.split(named[1].replace("JOBFILE", "tasks"))
    again = dayfly(*command, "--hypervisor", "fake", "--display", "none", "--json")
    assert again.code == 0, again.err
    second = dayfly(*words, "--confirm", again.json["id"], "--json")
    assert (second.code, second.json["decided_by"]) == (1, "must_pass")
    assert second.json["candidate"]["planned"] == COUNT


def test_evidence_beside_the_records_is_checked_when_it_is_asked_for(
    dayfly: Dayfly, run: Callable[..., str]
) -> None:
    base, candidate = run("oracle"), run("oracle")
    output = next(p for p in Path("jobs", candidate).glob("rollouts/*/*/*/verifier/*") if p.is_file())
    output.write_bytes(output.read_bytes() + b"1")
    words = ("gate", "--baseline", base, "--candidate", candidate, "--json", "--policy")
    assert dayfly(*words, policy(POLICY)).code == 0
    careful = dayfly(*words, policy(POLICY.replace("fake}", "fake, intact_evidence: true}")))
    assert (careful.code, careful.json["decided_by"]) == (4, "evidence.candidate")
    assert output.name in careful.json["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gate",), "no candidate is named"),
        (("gate", "last", "--candidate", "last"), "named twice"),
        (("gate", "nowhere", "--baseline", "last"), "'nowhere'"),
        (("gate", "last", "--baseline", "nowhere"), "'nowhere'"),
        (("gate", "last", "--confirm", "nowhere", "--baseline", "last"), "'nowhere'"),
        (("gate", "last", "--baseline", "last", "--policy", "nowhere.yaml"), "nowhere.yaml"),
        (("gate", "last"), "only compares with a baseline"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    dayfly: Dayfly, run: Callable[..., str], words: tuple[str, ...], said: str
) -> None:
    run("oracle")
    policy(POLICY)
    done = dayfly(*words, "--junit", "out.xml")
    assert done.code == 2 and said in done.err, done.err
    assert done.out == "" and not Path("out.xml").exists()


def test_a_file_that_cannot_be_written_is_said_and_keeps_nothing_else_back(
    dayfly: Dayfly, run: Callable[..., str]
) -> None:
    base, candidate = run("oracle"), run("no-op")
    Path("taken").mkdir()
    files = ("--junit", "taken", "--badge", "new/folder/out.svg", "-p", policy(POLICY))
    passed = dayfly("gate", "--baseline", base, "--candidate", base, *files)
    assert passed.code == 4 and "writing taken" in passed.err and "PASS: " in passed.out
    failed = dayfly("gate", "--baseline", base, "--candidate", candidate, *files)
    assert failed.code == 1 and "writing taken" in failed.err and Path("new/folder/out.svg").exists()
    dashed = dayfly("gate", "--baseline", base, "--candidate", candidate, "--summary", "-", "-p", policy(POLICY))
    assert dashed.code == 2 and "--summary FILE" in dashed.err


def test_a_closed_output_costs_neither_the_files_nor_the_exit_code(run: Callable[..., str]) -> None:
    base, candidate = run("oracle"), run("no-op")
    words = ("gate", "--baseline", base, "--candidate", candidate, "-p", policy(POLICY), "--junit", "out.xml")
    command = shlex.join([sys.executable, "-m", "dayfly.cli", *map(str, words)])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, timeout=60)
    assert done.returncode == 1 and b"Traceback" not in done.stderr, done.stderr
    assert JUnitXml.fromfile("out.xml").failures > 0


def test_annotations_are_printed_and_leave_json_one_document(dayfly: Dayfly, run: Callable[..., str]) -> None:
    base, candidate = run("oracle"), run("no-op")
    words = ("gate", "--baseline", base, "--candidate", candidate, "-p", policy(POLICY), "--annotations", "github")
    assert re.search(r"^::error ", dayfly(*words).out, re.MULTILINE)
    document = dayfly(*words, "--json")
    assert document.json["verdict"] == "fail" and re.search(r"^::error ", document.err, re.MULTILINE)


def test_a_step_summary_is_added_to_and_any_other_file_replaced(
    dayfly: Dayfly, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run("oracle")
    words = ("gate", "--baseline", base, "--candidate", base, "-p", policy(POLICY), "--summary")
    for name in ("step.md", "other.md"):
        Path(name).write_text("of an earlier command\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "step.md")
    for name in ("step.md", "other.md"):
        dayfly(*words, name)
    assert Path("step.md").read_text().startswith("of an earlier command\n")
    assert "of an earlier command" not in Path("other.md").read_text()
