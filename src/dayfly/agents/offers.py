"""What a task offers to agents beside its instruction: skills, tool servers, and what was said before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dayfly.model import McpServer
from dayfly.tasks import resolve_env

SKILLS_VARIABLE = "DAYFLY_SKILLS_DIR"
MCP_VARIABLE = "DAYFLY_MCP_SERVERS"
TRAJECTORY_VARIABLE = "DAYFLY_TRAJECTORY_FILE"
TRAJECTORY_FILE = "/logs/agent/prior-trajectory.json"


def offers_env(
    skills_dir: str | None, servers: Sequence[McpServer], trajectory: Path | None, host_env: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that tell a program in the VM of them; only of those that there are.

    Tool servers are JSON in a variable and not a file: with the credentials of their headers filled in they
    must not get onto the VM's disk, which may be kept. Raises `ConfigError` for a variable that is not set.
    """
    env = {}
    if skills_dir is not None:
        env[SKILLS_VARIABLE] = skills_dir
    if servers:
        env[MCP_VARIABLE] = mcp_json(servers, host_env)
    if trajectory is not None:
        env[TRAJECTORY_VARIABLE] = TRAJECTORY_FILE
    return env


def mcp_json(servers: Sequence[McpServer], host_env: Mapping[str, str]) -> str:
    """`{"mcpServers": {name: …}}`, the form that most agents read; `${VAR}` in headers is filled."""
    return json.dumps({"mcpServers": {server.name: _entry(server, host_env) for server in servers}})


def _entry(server: McpServer, host_env: Mapping[str, str]) -> dict[str, object]:
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": list(server.args)}
    kind = "http" if server.transport == "streamable-http" else server.transport
    entry: dict[str, object] = {"type": kind, "url": server.url}
    if server.headers:
        entry["headers"] = resolve_env(server.headers, host_env)
    return entry
