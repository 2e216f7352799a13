"""Errors of a build, with the instruction that it ended in."""

from __future__ import annotations

import re

from dayfly.errors import ImageError
from dayfly.images.builder.dockerfile import instruction_at
from dayfly.images.builder.log import BuildLog
from dayfly.images.builder.request import BuildPlan

_STATUS = re.compile(r"exit status (\d+)")


def failed(plan: BuildPlan, log: BuildLog, why: str | None = None, remedy: str = "") -> ImageError:
    """The build ended with an error; `why` and `remedy` when the cause is known to be a limit."""
    said = log.last_lines(8)
    last = said.splitlines()[-1] if said else "it said nothing"
    if why is None:
        status = _STATUS.search(last)
        why = f"exit status {status[1]}" if status else last[:300]
    hint = f"{remedy + '; ' if remedy else ''}the whole log is {log.path}; its end:\n{said}"
    return ImageError(f"{_place(plan, log)}: {why}", hint=hint, cause="build_failed")


def timed_out(plan: BuildPlan, log: BuildLog) -> ImageError:
    return ImageError(
        f"{_place(plan, log)}: the build did not end within {plan.request.timeout_s:g} s",
        hint=f"raise build_timeout_sec (--timeout); the log is {log.path}; its end:\n{log.last_lines(5)}",
        cause="build_timeout",
    )


def _place(plan: BuildPlan, log: BuildLog) -> str:
    one = instruction_at(plan.instructions, log.step, plan.added_steps)
    if one is None:
        return str(plan.request.dockerfile)
    text = one.text if len(one.text) <= 120 else one.text[:117] + "..."
    return f"{plan.request.dockerfile}:{one.line}: {text}"
