"""Reading files of settings that people write: YAML without repeated keys, and what is wrong in plain words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dayfly.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's readers keep the last one, a person may see only the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen:
                problem = f"the key {key_node.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_settings(path: Path, *, what: str, example: str) -> dict[str, Any]:
    """The table that a YAML file holds. Raises `ConfigError`.

    `what` says what the path should be of ("a gate's policy"), `example` a file to look at.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", hint=f"give the path of {what}") from e
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not YAML: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a table of settings", hint=f"see {example}")
    return data


def refused(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    """The first thing that is wrong, with its place in the file and, for a misspelt key, the nearest one."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if part != "[key]"]
    message = first["msg"].removeprefix("Value error, ")
    hint = None
    if first["type"] == "extra_forbidden":
        message = "there is no such key"
        hint = nearest(place[-1], _inner_model(model, first["loc"][:-1]).model_fields, "known keys")
    return ConfigError(f"{where}: {'.'.join(place)}: {message}" if place else f"{where}: {message}", hint=hint)


def nearest(word: str, known: Mapping[str, object] | list[str], otherwise: str) -> str:
    """A hint: the known word that `word` is most like, or all of them."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise}: {', '.join(known)}"


def _inner_model(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that stands at a place below `model`; positions in lists and names in tables lead no deeper."""
    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(iter(_models_in(field.annotation)), model)
    return model


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in get_args(annotation) for m in _models_in(inner)]
