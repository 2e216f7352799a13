"""What a loader found doubtful in a task, and what that means when strict and when not."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from dayfly.errors import TaskError


@dataclass
class Findings:
    """Doubts are errors under `check` and warnings elsewhere; remarks are warnings everywhere."""

    where: Path
    doubts: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def doubt(self, text: str, hint: str) -> None:
        self.doubts.append(text)
        self.hints.append(hint)

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def settle(self, *, strict: bool) -> tuple[str, ...]:
        """The warnings. Raises `TaskError` with all doubts when strict."""
        if strict and self.doubts:
            raise TaskError(f"{self.where}: {'; '.join(self.doubts)}", hint="; ".join(self.hints))
        doubts = [f"{text} ({hint})" for text, hint in zip(self.doubts, self.hints, strict=True)]
        return (*doubts, *self.remarks)


def without_unknown_keys(
    data: dict[str, Any], model: type[BaseModel], findings: Findings, table: str = ""
) -> dict[str, Any]:
    """`data` reduced to the keys of `model`, at every depth; what is left out becomes a doubt."""
    known: dict[str, Any] = {}
    for key, value in data.items():
        shown = f"{table}.{key}" if table else key
        if key not in model.model_fields:
            findings.doubt(f"unknown key {shown}", _suggestion(key, model, table))
            continue
        inner = table_in(model.model_fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            value = without_unknown_keys(value, inner, findings, shown)
        elif inner is not None and isinstance(value, list):
            value = [
                without_unknown_keys(v, inner, findings, f"{shown}[{n}]") if isinstance(v, dict) else v
                for n, v in enumerate(value)
            ]
        known[key] = value
    return known


def _suggestion(key: str, model: type[BaseModel], table: str) -> str:
    near = get_close_matches(key, model.model_fields, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if not table:
        return "free-form data belongs into [metadata]"
    return f"known keys: {', '.join(sorted(model.model_fields))}"


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The table type within `X`, `X | None` or `list[X]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, UnionType):
        return next((m for m in map(table_in, get_args(annotation)) if m is not None), None)
    return None
