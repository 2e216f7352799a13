"""Built-in agents: oracle, no-op, a command in the VM, a Python function on the host."""

from dayfly.agents.command import CommandAgent, CommandOptions
from dayfly.agents.digest import agent_digest
from dayfly.agents.function import FunctionAgent
from dayfly.agents.offers import mcp_json, offers_env
from dayfly.agents.oracle import NoOpAgent, OracleAgent
from dayfly.agents.patch import PatchAgent

__all__ = [
    "CommandAgent",
    "CommandOptions",
    "FunctionAgent",
    "NoOpAgent",
    "OracleAgent",
    "PatchAgent",
    "agent_digest",
    "mcp_json",
    "offers_env",
]
