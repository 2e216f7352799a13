"""dayfly: evaluate AI agents, each rollout in its own disposable microVM."""

__version__ = "0.1.0"
