"""An agent that is a Python function on the host: `async def agent(vm, task)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import anyio
from pydantic import ConfigDict

from dayfly.agents.options import parse_options
from dayfly.errors import AgentError, ConfigError, DayflyError, GuestRefused
from dayfly.model import Frozen, Task
from dayfly.protocols import AgentResult, Record, Vm

AgentFunction = Callable[[Vm, Task], Awaitable[AgentResult | None]]
TRACEBACK_NAME = "agent/traceback.txt"


class FunctionOptions(Frozen):
    """Options of the agent `function`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    function: str | Callable[..., Any]
    """`package.module:name`, or `path/to/file.py:name` relative to the job file; from Python also a callable."""


class FunctionAgent:
    """Calls an async function with the VM and the task. It returns nothing, or an `AgentResult`.

    The function runs in the controller's process, with its rights: it is code that you trust.
    """

    def __init__(self, function: AgentFunction) -> None:
        """Raises `ConfigError` when `function` is not async: a blocking one would stop every other rollout."""
        if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
            raise ConfigError(
                f"the agent function {_name(function)} is not async",
                hint="write it as `async def agent(vm, task)`",
            )
        self.function = function

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base_dir: Path) -> FunctionAgent:
        return cls(find_function(parse_options(FunctionOptions, options, "function").function, base_dir))

    async def run(self, vm: Vm, task: Task, record: Record, timeout_s: float) -> AgentResult:
        """See `protocols.Agent`. What the function raises is kept in agent/traceback.txt.

        Faults of the VM or a provider pass through; any other exception is an `AgentError`.
        """
        with anyio.move_on_after(timeout_s) as limit:
            try:
                result = await self.function(vm, task)
            except (Exception, SystemExit) as error:
                record.write(TRACEBACK_NAME, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
                known = next(_known_faults(error), None)
                if known is error:
                    raise
                raise known or _agent_error(error) from error
        if limit.cancelled_caught:
            return AgentResult(exit_code=None, timed_out=True, message="out of time")
        if result is None:
            return AgentResult()
        if isinstance(result, AgentResult):
            return result
        raise AgentError(
            f"the agent function returned {type(result).__name__}",
            hint="return nothing, or a dayfly.protocols.AgentResult",
        )


def _known_faults(error: BaseException) -> Iterator[DayflyError]:
    """Faults that dayfly has a name for, also within a group that a task group made of them.

    A request that the guest declined is the agent's own affair, unless it says so itself.
    """
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _known_faults(inner)
    elif isinstance(error, DayflyError) and not isinstance(error, GuestRefused):
        yield error


def _agent_error(error: BaseException) -> AgentError:
    return AgentError(
        f"the agent function raised {type(error).__name__}: {error}",
        hint=f"see {TRACEBACK_NAME}",
        cause="agent_exception",
    )


def find_function(where: str | Callable[..., Any], base_dir: Path) -> AgentFunction:
    """The function that `where` names. Raises `ConfigError`."""
    if not isinstance(where, str):
        return where
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"{where!r} names no function", hint="write package.module:function or path/to/file.py:function"
        )
    try:
        module = _load_file(base_dir / place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as e:
        raise ConfigError(f"{place!r} cannot be imported: {type(e).__name__}: {e}", hint="mend the module") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{place!r} has no function {name!r}", hint="check the name after the colon")
    return cast("AgentFunction", function)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"dayfly_agent_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
