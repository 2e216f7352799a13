"""Engines: how the rollouts of a job are spread over a machine (or, later, many)."""
