"""What a task offers beside its instruction reaches agents: skills, tool servers, a prior trajectory."""

from __future__ import annotations

import json

import pytest

from dayfly.errors import ConfigError
from dayfly.evidence import JobFolder
from dayfly.model import Outcome

OFFERS = """\
schema_version = "1.4"
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
skills_dir = "skills"
[[environment.mcp_servers]]
name = "desk"
transport = "http"
url = "http://127.0.0.1:8000/mcp"
headers = { Authorization = "${DESK_TOKEN}" }
[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "serve-files"
args = ["--root", "/app"]
"""
ASK = "#!fake\nenv DAYFLY_SKILLS_DIR\nenv DAYFLY_MCP_SERVERS\nenv DAYFLY_TRAJECTORY_FILE\n"
SECRET = "Bearer abc-123-secret"
DESK = {"type": "http", "url": "http://127.0.0.1:8000/mcp", "headers": {"Authorization": SECRET}}
FILES = {"type": "stdio", "command": "serve-files", "args": ["--root", "/app"]}


def asking(tmp_path, **options):
    (tmp_path / "ask").write_text(ASK)
    return {
        "name": "ask",
        "kind": "command",
        "options": {"argv": ["/opt/ask"], "files": {"ask": "/opt/ask"}, **options},
    }


@pytest.fixture
def heard(make_task, plan_job, run_fake, tmp_path, monkeypatch):
    """The three values that the agent saw, and the rollout's folder."""
    monkeypatch.setenv("DESK_TOKEN", SECRET)

    def run(toml=OFFERS, **options):
        folder = make_task(test="#!fake\nwrite /logs/verifier/reward.txt 1\n")
        (folder / "task.toml").write_text(toml)
        (folder / "trajectory.json").write_text('{"steps": []}')
        (record,) = run_fake(plan_job([asking(tmp_path, **options)])).records
        assert record.outcome is Outcome.PASSED, record.cause
        place = JobFolder.open(tmp_path / "jobs", record.job_id).rollout_path(record.key)
        return (place / "agent/stdout.txt").read_text().splitlines(), place

    return run


def test_a_command_is_told_of_skills_tool_servers_and_the_trajectory(heard):
    (skills, servers, trajectory), place = heard()
    assert skills == "/app/skills"
    assert json.loads(servers) == {"mcpServers": {"desk": DESK, "files": FILES}}
    assert trajectory == "/logs/agent/prior-trajectory.json"
    assert (place / "agent/logs/prior-trajectory.json").read_text() == '{"steps": []}'


def test_credentials_of_tool_servers_are_stored_nowhere_but_where_the_agent_puts_them(heard, tmp_path):
    _, place = heard()
    (place / "agent/stdout.txt").unlink()  # the one file that this agent printed it to
    kept = [p for p in tmp_path.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert kept == []


def test_an_agents_own_options_win(heard):
    own = {"name": "mine", "transport": "sse", "url": "http://127.0.0.1:1/sse"}
    (skills, servers, _), _ = heard(skills_dir="/opt/skills", mcp_servers=[own])
    assert skills == "/opt/skills"
    assert json.loads(servers) == {"mcpServers": {"mine": {"type": "sse", "url": "http://127.0.0.1:1/sse"}}}


def test_without_offers_there_are_no_variables(heard):
    toml = OFFERS.split("skills_dir")[0]
    (skills, servers, _), _ = heard(toml)
    assert (skills, servers) == ("", "")


def test_a_credential_that_is_not_set_is_found_before_anything_starts(make_task, plan_job, tmp_path, monkeypatch):
    monkeypatch.delenv("DESK_TOKEN", raising=False)
    (make_task() / "task.toml").write_text(OFFERS)
    with pytest.raises(ConfigError, match="DESK_TOKEN"):
        plan_job([asking(tmp_path)])
    plan_job(["oracle", "no-op"])  # they use no tools


def test_a_function_is_given_them_as_data(make_task, plan_job, run_fake, tmp_path, monkeypatch):
    monkeypatch.setenv("DESK_TOKEN", SECRET)
    (make_task() / "task.toml").write_text(OFFERS)
    (tmp_path / "agent.py").write_text(
        "async def agent(vm, task):\n"
        "    names = [s.name for s in task.mcp_servers]\n"
        "    await vm.put(f'{task.skills_dir} {names}\\n'.encode(), '/logs/agent/seen')\n"
    )
    entry = {"name": "look", "kind": "function", "options": {"function": "agent.py:agent"}}
    (record,) = run_fake(plan_job([entry])).records
    place = JobFolder.open(tmp_path / "jobs", record.job_id).rollout_path(record.key)
    assert (place / "agent/logs/seen").read_text() == "/app/skills ['desk', 'files']\n"
