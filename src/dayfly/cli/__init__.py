"""The command line. Data goes to standard output; progress and remarks go to standard error.

Exit codes: 0 done · 1 the answer is no · 2 usage or configuration · 3 inconclusive · 4 could not run, or no
valid answer · 130 interrupted. Every option can be set by `DAYFLY_<COMMAND>_<OPTION>` (`DAYFLY_JOBS_DIR` and
`DAYFLY_HYPERVISOR` hold for all commands).
"""

from __future__ import annotations

import os
import sys

import typer

import dayfly
from dayfly.cli import admin, check, run, shell, show
from dayfly.errors import DayflyError

app = typer.Typer(
    name="dayfly",
    help="Evaluate AI agents: every rollout in its own disposable microVM, a verifier decides.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "DAYFLY", "help_option_names": ["-h", "--help"]},
)
for module in (run, check, show, shell, admin):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dayfly {dayfly.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Evaluate AI agents: every rollout in its own disposable microVM, a verifier decides."""


def main() -> None:
    """Entry point of the `dayfly` program."""
    try:
        app()
    except DayflyError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            for line in error.hint.splitlines():
                print(f"  hint: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader went away (`dayfly list | head`): nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
