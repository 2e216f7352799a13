"""Judges: a test script by Harbor's contract, a command by its exit status, and the one reward parser."""

from dayfly.verifiers.command import CommandVerifier
from dayfly.verifiers.rewards import choose_reward, parse_rewards
from dayfly.verifiers.script import ScriptVerifier
from dayfly.verifiers.steps import combine, shortfall

__all__ = ["CommandVerifier", "ScriptVerifier", "choose_reward", "combine", "parse_rewards", "shortfall"]
