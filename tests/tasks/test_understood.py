"""Of every field of task.toml it is said what becomes of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dayfly.cli import app
from dayfly.tasks import TaskFile, understood
from dayfly.tasks.findings import table_in
from dayfly.tasks.understood import RULES, rule_for


def fields_of(model, prefix=""):
    for name, field in model.model_fields.items():
        inner = table_in(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            entries = "list" in str(field.annotation)
            yield from fields_of(inner, f"{prefix}{name}{'[]' if entries else ''}.")


def test_every_field_of_the_format_has_a_rule_and_every_rule_a_field():
    every = list(fields_of(TaskFile))
    assert len(every) >= 150 and [k for k in every if rule_for(k) is None] == []
    known = {k for key in every for k in (key, key.removeprefix("steps[]."))}
    tables_as_lists = {"artifacts", "steps", "task.authors", "verifier.collect", "environment.mcp_servers"}
    assert set(RULES) - known == tables_as_lists  # these may be written as empty lists


def states(folder):
    return {f.key: (f.state, f.value) for f in understood(folder)}


def test_used_noted_refused_and_unknown_with_their_values(make_task):
    toml = """\
version = "1.0"
artifacts = ["/app/out", { source = "/var/x", service = "db" }]
[task]
name = "a/b"
keywords = ["x"]
[environment]
docker_image = "x"
cpus = 1.5
allow_internet = true
gpus = 2
memroy_mb = 3
[agent]
network_mode = "no-network"
[[steps]]
name = "one"
min_reward = 0.5
verifier.network_mode = "allowlist"
verifier.environment.skills_dir = "x"
agent.timeout_sec = -1
"""
    seen = states(make_task(toml))
    assert seen["schema_version"] == ("used", "1.0")
    assert seen["artifacts[0].source"] == ("used", "/app/out")
    assert seen["artifacts[1].service"] == ("refused", "db")
    assert seen["task.keywords"] == ("noted", ["x"])
    assert seen["environment.cpus"] == ("used", 1.5)
    assert seen["environment.allow_internet"] == ("noted", True)
    assert seen["environment.gpus"] == ("refused", 2)
    assert seen["environment.memroy_mb"] == ("unknown", 3)
    assert seen["agent.network_mode"] == ("used", "no-network")
    assert seen["steps[0].min_reward"] == ("used", 0.5)
    assert seen["steps[0].verifier.network_mode"] == ("refused", "allowlist")
    assert seen["steps[0].verifier.environment.skills_dir"] == ("noted", "x")
    assert seen["steps[0].agent.timeout_sec"] == ("refused", -1)  # a value that cannot be


@pytest.mark.parametrize("toml", ["environment = 3", "steps = [1]", "steps = []", "task = []"])
def test_odd_files_are_no_crash(make_task, toml):
    assert understood(make_task(toml))


def test_what_is_no_toml_has_no_fields(make_task):
    assert understood(make_task("x = ")) == []


def check(*args):
    return CliRunner().invoke(app, ["check", "--static", *map(str, args)])


def test_check_prints_every_field_of_one_task_and_of_several_what_has_no_effect(make_task):
    toml = "[environment]\ndocker_image = 'x'\nallow_internet = true"
    one, two = make_task(toml, name="set/one"), make_task(toml, name="set/two")
    alone = check(one).stdout
    assert "used:    environment.docker_image = 'x'" in alone
    assert "noted:   environment.allow_internet = True" in alone
    several = check(one, two).stdout
    assert "environment.docker_image" not in several and several.count("noted:   environment.allow") == 2
    assert check(one, two, "--fields").stdout.count("environment.docker_image = 'x'") == 2
    assert "environment.allow_internet = " not in check(one, "--no-fields").stdout


def test_a_task_that_is_refused_is_listed_as_well(make_task):
    bad = make_task(
        "[environment]\ndocker_image = 'x'\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']\n"
        "[metadata]\nwhen = 2026-01-01\nlimit = inf"
    )
    found = check(bad, "--json")
    (report,) = json.loads(found.stdout, parse_constant=pytest.fail)["tasks"]
    assert found.exit_code == 1 and report["fit"] is False
    field = next(f for f in report["fields"] if f["key"] == "environment.network_mode")
    assert (field["state"], field["value"]) == ("refused", "allowlist") and field["note"]
