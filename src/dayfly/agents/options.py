"""An agent's options as written in a job file → a small frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dayfly.errors import ConfigError

Options = TypeVar("Options", bound=BaseModel)


def parse_options(model: type[Options], options: Mapping[str, Any], agent: str) -> Options:
    """Raises `ConfigError` naming the option and, for a misspelt one, the nearest known."""
    for key in options:
        if key not in model.model_fields:
            near = get_close_matches(str(key), model.model_fields, n=1)
            known = ", ".join(sorted(model.model_fields)) or "none"
            raise ConfigError(
                f"the agent {agent!r} has no option {key!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"options: {known}",
            )
    try:
        return model.model_validate(dict(options))
    except ValidationError as e:
        one = e.errors(include_url=False)[0]
        key = ".".join(str(part) for part in one["loc"])
        raise ConfigError(
            f"the agent {agent!r}: option {key}: {one['msg'].removeprefix('Value error, ')}",
            hint="see docs/tasks.md for the options of the built-in agents",
        ) from e
