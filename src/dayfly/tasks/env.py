"""Environment values that refer to the host: `${VAR}` and `${VAR:-default}`, whole values only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dayfly.errors import ConfigError

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_env(env: Mapping[str, str], host_env: Mapping[str, str]) -> dict[str, str]:
    """Fill templates from `host_env`; other values stay as they are, also when a template is only a part.

    The result may hold secrets: hand it to the guest, do not store it.
    Raises `ConfigError` naming every variable that is set nowhere.
    """
    resolved: dict[str, str] = {}
    missing: list[str] = []
    for key, value in env.items():
        found = _TEMPLATE.fullmatch(value)
        if found is None:
            resolved[key] = value
        elif found[1] in host_env:
            resolved[key] = host_env[found[1]]
        elif found[2] is not None:
            resolved[key] = found[2]
        else:
            missing.append(found[1])
    if missing:
        names = ", ".join(sorted(set(missing)))
        raise ConfigError(
            f"the environment variable {names} is not set on this host",
            hint=f"export it before the run, or give a default: ${{{missing[0]}:-value}}",
            cause="missing_variable",
        )
    return resolved
