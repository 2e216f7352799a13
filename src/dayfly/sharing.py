"""Many records in little memory: equal parts become one object.

A job of a hundred thousand rollouts keeps a record of each. Nearly all of one is the same in the next: digests,
command lines, the start fingerprint, file names. The records stay equal to what they were.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from dayfly.model import Fingerprint, Machine, RolloutRecord, Usage

UNIQUE = frozenset({"rollout_id", "seal", "id"})
"""Fields whose text is never the same twice."""
LONGEST = 500
"""Texts beyond this many characters are left alone: they are messages."""


M = TypeVar("M", bound=BaseModel)


class Sharing:
    """Shares parts among the records that were given to it."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def share(self, record: RolloutRecord) -> RolloutRecord:
        """An equal record whose parts are shared with earlier ones."""
        return self._model(record.model_copy())

    def _model(self, value: M) -> M:
        for name, part in value.__dict__.items():
            value.__dict__[name] = part if name in UNIQUE else self._part(part)
        # Which fields were given explicitly is asked by nobody, and was a third of a record.
        object.__setattr__(value, "__pydantic_fields_set__", _all_fields(value.__class__))
        return value

    def _part(self, part: Any) -> Any:
        match part:
            case str():
                return self._text(part)
            case Fingerprint():
                known = self._known.setdefault(part.digest, part)
                return known if known == part else part
            case Machine() | Usage():
                return self._known.setdefault(part, part)
            case BaseModel():
                return self._model(part.model_copy())
            case tuple():
                return tuple(self._part(p) for p in part)
            case dict():
                return {self._text(k): self._part(v) for k, v in part.items()}
            case _:
                return part

    def _text(self, text: str) -> str:
        # Exactly str: an enum's member is a text, too, and must stay what it is.
        return sys.intern(text) if type(text) is str and len(text) <= LONGEST else text


@cache
def _all_fields(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields)
