"""What is printed, where, and that no text of a guest can do anything but be read."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

import dayfly.cli
from dayfly.text import visible

BARE = ast.JoinedStr | ast.BinOp
CLI = Path(dayfly.cli.__file__).parent
EVIL = "[red]x[/red]\x1b]0;owned\x07\x9b2J\u202e\u2028\r"
SAID = "[red]x[/red]\x1b]0;owned\x07\u202e"
"""What a fake script can print; it is cut into lines where Python sees one."""
HARMLESS = "[red]x[/red]\\x1b]0;owned\\x07\\x9b2J\\u202e\\u2028\\r"


@pytest.fixture
def evil_job(make_task, run_job):
    """A job whose task name, agent output and causes hold everything that could do harm."""
    make_task("[bold]nice", solve=f"#!fake\nprint {SAID}\nwrite result.txt done\n")
    # `print` is what the verifier says; a verdict that is no number is quoted in the cause
    make_task("broken", test=f"#!fake\nwrite /logs/verifier/reward.txt '{SAID}'\n")
    return run_job("-a", "oracle")


def test_text_is_made_visible():
    assert visible(EVIL) == HARMLESS
    assert visible("Grüße, 世界 – 10 %") == "Grüße, 世界 – 10 %"
    assert visible("a\nb\tc\udcff") == "a\\nb\\tc\\udcff"


def test_only_one_module_writes_to_the_terminal():
    """The kind of fault, not one of it: text reaches rich and the streams through `output.py` alone."""
    found = []
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            called = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
            if called in ("print", "Console", "echo", "secho") and path.name != "output.py":
                found.append(f"{path.name}:{node.lineno}: {called}")
            if called in ("add_row", "from_markup") and path.name != "output.py":
                # rich reads a bare string as markup
                found += [f"{path.name}:{a.lineno}: a string" for a in node.args if isinstance(a, BARE)]
    assert found == []


def test_no_control_sequence_of_a_guest_reaches_a_terminal(evil_job, on_terminal):
    for command in (
        ["list"],
        ["show", "last"],
        ["show", "last/broken/oracle/1"],
        ["show", "last/[bold]nice/oracle/1"],
        ["show", "last", "--json"],
        ["logs", "last"],
        ["logs", "last/[bold]nice/oracle/1"],
        ["run", "--resume", "last", "--dry-run"],
        ["run", "--resume", "last", "--display", "plain"],
        ["run", "--resume", "last", "--display", "full"],
        ["show", "nothing\x1b]0;owned\x07"],
    ):
        shown = on_terminal(100, *command).out
        for harm in ("\x1b]0;", "\x07", "\x9b", "\u202e", "\u2028"):
            assert harm not in shown, (command, shown)
        if command[1:2] == ["last"] or "--dry-run" in command:
            assert "[bold]nice" in shown, "taken for markup"


def test_causes_and_names_are_shown_whole_and_literal(evil_job, dayfly):
    shown = dayfly("show", "last").out
    assert "[bold]nice/oracle/1" in shown
    assert "verifier_error" in shown


def test_logs_are_harmless_on_a_terminal(evil_job, on_terminal):
    name = "last/[bold]nice/oracle/1"
    done = on_terminal(100, "logs", name, "--part", "agent")
    assert "\\x1b]0;owned\\x07" in done.out and "\x1b]0;" not in done.out


def test_a_pipe_gets_every_byte(evil_job, start):
    wanted = next(Path("jobs").glob("*/rollouts/*nice*/oracle/1/agent/stdout.txt")).read_bytes()
    assert SAID.encode() in wanted
    process = start("logs", "last/[bold]nice/oracle/1", "--part", "agent")
    out, err = process.communicate(timeout=30)
    assert out == wanted
    assert b"agent/stdout.txt" in err


def test_colours_of_a_log_are_kept_on_a_terminal(make_task, run_job, on_terminal):
    make_task(solve="#!fake\nprint '\x1b[31mred\x1b[0m'\nwrite result.txt done\n")
    run_job("-a", "oracle")
    assert "\x1b[31mred\x1b[0m" in on_terminal(80, "logs", "last/one/oracle/1").out


def test_nothing_is_cut_in_a_pipe_nor_on_a_narrow_terminal(make_task, run_job, dayfly, on_terminal):
    name = "a-rather-long-task-name-that-says-what-it-is-about-and-goes-on"
    make_task(name)
    run_job("-a", "oracle", "-a", "no-op")
    for out in (
        dayfly("show", "last").out,
        on_terminal(80, "show", "last").out,
        on_terminal(40, "show", "last").out,
    ):
        assert f"{name}/oracle/1" in out
        assert "…" not in out
    digest = dayfly("show", f"last/{name}/oracle/1", "--json").json["task_digest"]
    assert digest in on_terminal(50, "show", f"last/{name}/oracle/1").out


def test_colour_only_where_it_is_wanted(make_task, run_job, dayfly, on_terminal):
    make_task()
    run_job("-a", "oracle")
    assert "\x1b[" not in dayfly("show", "last").out
    assert "\x1b[32m" in on_terminal(80, "show", "last").out
    assert "\x1b[3" not in on_terminal(80, "show", "last", env={"NO_COLOR": "1"}).out


def test_progress_is_drawn_on_a_terminal_and_written_in_lines_elsewhere(make_task, on_terminal, start):
    make_task()
    args = ("run", "tasks", "-a", "oracle", "--hypervisor", "fake")
    assert "\x1b[2K" in on_terminal(80, *args).out
    for env in ({"CI": "true"}, {"TERM": "dumb"}):
        assert "\x1b[2K" not in on_terminal(80, *args, env=env).out
    out, err = start(*args).communicate(timeout=30)
    assert b"1/1 passed" in err and b"\x1b" not in err + out


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_terminals_that_cannot_show_a_character(make_task, run_job, start, encoding):
    make_task("grüße-世界")
    run_job("-a", "oracle")
    env = {"PYTHONIOENCODING": encoding}
    process = start("show", "last", env=env)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    out, _ = start("show", "last", "--json", env=env).communicate(timeout=30)
    assert json.loads(out.decode(encoding))["rollouts"][0]["task"] == "grüße-世界"


def test_a_reader_that_goes_away_changes_no_exit_code(make_task, run_job, start):
    make_task()
    job = run_job("-a", "oracle", "-k", "30")
    ours, theirs = os.pipe()
    os.close(ours)
    process = start("show", job, stdout=theirs)
    os.close(theirs)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")


def test_a_job_goes_on_when_nobody_reads_its_progress(make_task, start, dayfly):
    make_task()
    ours, theirs = os.pipe()
    os.close(ours)
    process = start(
        "run", "tasks", "-a", "oracle", "-k", "5", "--hypervisor", "fake", "--display", "json", stdout=theirs
    )
    os.close(theirs)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert dayfly("list", "--json").json["jobs"][0]["graded"] == 5


def test_one_document_with_json_and_lines_with_display_json(make_task, dayfly):
    make_task()
    args = ("run", "tasks", "-a", "oracle", "-k", "2", "--hypervisor", "fake")
    done = dayfly(*args, "--json")
    assert done.json["summary"]["total"]["graded"] == 2
    assert "2/2 passed" in done.err
    lines = [json.loads(line) for line in dayfly(*args, "--display", "json").out.splitlines()]
    assert lines[0]["event"] == "job_started"
    assert lines[-1]["event"] == "result" and lines[-1]["summary"]["total"]["graded"] == 2
    assert {"phase", "rollout_started", "rollout_finished"} <= {line["event"] for line in lines}
    both = dayfly(*args, "--json", "--display", "json")
    assert both.code == 2 and both.out == "" and "--display json" in both.err


def test_display_none_says_nothing_and_keeps_the_answer(make_task, dayfly):
    make_task()
    done = dayfly("run", "tasks", "-a", "oracle", "--hypervisor", "fake", "--display", "none")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^oracle\s+1\.000", done.out, re.MULTILINE)


def test_commands_to_copy_are_quoted(make_task, dayfly, tmp_path):
    make_task("[odd] name")
    jobs = tmp_path / "my jobs"
    done = dayfly("run", "tasks", "-a", "no-op", "--hypervisor", "fake", "--jobs-dir", str(jobs))
    line = next(line for line in done.out.splitlines() if line.startswith("  dayfly logs"))
    assert "/[odd] name/no-op/1'" in line
    assert f"--jobs-dir '{jobs}'" in line
