"""`dayfly plan` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dayfly.cli import app
from dayfly.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples/demo"


def plan(*words: object) -> str:
    done = CliRunner().invoke(app, ["plan", *map(str, words)])
    if done.exception is not None:
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def answer(*words: object) -> dict[str, Any]:
    return json.loads(plan(*words, "--json"))


def test_a_job_file_is_planned_with_its_tasks_and_attempts():
    seen = answer(DEMO / "job.yaml")
    assert (seen["tasks"], seen["attempts"], seen["rollouts"]) == (12, 2, 24)
    assert seen["discordance"] == {"share": 0.2, "source": "assumed", "tasks": 0}
    assert (seen["margin"], seen["watched"]) == (0.0, None)


def test_options_change_the_plan():
    seen = answer(DEMO / "tasks", "--attempts", 3, "--discordant", 0.3, "--drop", 0.25)
    assert (seen["attempts"], seen["drop"], seen["discordance"]["source"]) == (3, 0.25, "given")
    more = answer(DEMO / "tasks", "--attempts", 6, "--discordant", 0.3, "--drop", 0.25)
    assert more["at_end"]["power"] > seen["at_end"]["power"]


def test_a_policy_gives_margin_alpha_and_what_looking_early_spends(tmp_path):
    (tmp_path / "gate.yaml").write_text(
        "alpha: 0.1\nmetrics: {score: {margin: 0.03}}\nearly_stop: {alpha_share: 0.2}\n"
    )
    seen = answer(DEMO / "tasks", "--gate", tmp_path / "gate.yaml")
    assert (seen["margin"], seen["at_end"]["alpha"]) == (0.03, 0.1)
    assert seen["watched"]["alpha"] == pytest.approx(0.08)
    assert "finer than these rollouts can show" in seen["warnings"][-1]


def test_quarantined_tasks_do_not_count(tmp_path):
    (tmp_path / "quarantine.yaml").write_text(
        "tasks: [{task: serve-sums, owner: me, reason: flaky, expires: 2099-01-01}]\n"
    )
    (tmp_path / "gate.yaml").write_text("metrics: {score: {margin: 0.1}}\nquarantine: quarantine.yaml\n")
    assert answer(DEMO / "tasks", "--gate", tmp_path / "gate.yaml")["tasks"] == 11


def test_the_text_says_all_of_it():
    text = plan(DEMO / "job.yaml", "--gate", DEMO / "gate.yaml")
    for words in ("12 tasks × 2 attempts = 24 rollouts", "assumed", "smallest drop", "with run --gate", "2.5 %"):
        assert words in text
    assert "an identical candidate passes" in text and "11 regressions in a row" in text
    assert "nan" not in text.lower().replace("nanc", "") and "None" not in text


def test_a_job_file_stands_alone():
    with pytest.raises(ConfigError, match="stands alone"):
        plan(DEMO / "job.yaml", DEMO / "tasks")
