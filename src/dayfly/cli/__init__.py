"""The command line. Data goes to standard output; progress and remarks go to standard error.

Exit codes: 0 done · 1 the answer is no · 2 usage or configuration · 3 inconclusive · 4 could not run, or no
valid answer · 130 interrupted. Every option can be set by `DAYFLY_<COMMAND>_<OPTION>` (`DAYFLY_JOBS_DIR` and
`DAYFLY_HYPERVISOR` hold for all commands).
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer

import dayfly
from dayfly.cli import admin, baseline, build, check, compare, convert, gate, logs, plan, pull, run, shell, show
from dayfly.cli.interrupts import Interrupted
from dayfly.cli.output import keep_going_on_odd_terminals, put, say_error
from dayfly.errors import DayflyError

app = typer.Typer(
    name="dayfly",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # `JOB[/ROLLOUT]` is no markup, and plain text is right in every width and log
    context_settings={"auto_envvar_prefix": "DAYFLY", "help_option_names": ["-h", "--help"]},
)
for module in (run, check, show, logs, shell, admin, pull, build, convert, gate, plan, baseline, compare):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        put(f"dayfly {dayfly.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            allow_from_autoenv=False,  # DAYFLY_VERSION is somebody's pin, not a question
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Evaluate AI agents: every rollout in its own disposable microVM, a verifier decides."""


def main() -> None:
    """Entry point of the `dayfly` program."""
    keep_going_on_odd_terminals()
    try:
        app(prog_name="dayfly")
    except (Interrupted, KeyboardInterrupt):
        _leave_interrupted()
    except SystemExit as leaving:
        if leaving.code == 130 or _comes_from_interrupt(leaving):
            _leave_interrupted()
        raise
    except Exception as error:
        sys.exit(_explain(error))


def _comes_from_interrupt(error: BaseException | None) -> bool:
    """Click makes exit code 1 of a Ctrl-C nobody listens for, as in the moment after a job has let go of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave_interrupted() -> NoReturn:
    """Exit 130, also when a second Ctrl-C meets the interpreter while it shuts down: all is cleaned up by now."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(130)


def _explain(error: Exception) -> int:
    """Say what went wrong; returns the exit code. A traceback only for what nobody foresaw."""
    errors = list(_leaves(error))
    unforeseen = [e for e in errors if not isinstance(e, DayflyError | OSError)]
    if unforeseen:
        traceback.print_exception(unforeseen[0])
        say_error("this is a fault in dayfly or in a plug-in", "please report it with the lines above")
        return 4
    for message, hint in dict.fromkeys(_words(e) for e in errors):
        say_error(message, hint)
    return max(e.exit_code if isinstance(e, DayflyError) else 4 for e in errors)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _words(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, DayflyError):
        return error.message, error.hint
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}", None
    return str(error), None
