"""The one door to the terminal: no other module of the command line prints.

Names, causes and outputs may come from an agent or a task and hold anything: escape sequences, `[red]`, line
breaks that forge a line. Text therefore never reaches rich as markup, and control characters are made
visible before anything is written.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dayfly.text import UNSAFE, escape, visible

# A log keeps its lines and its colours (as `less -R` does); cursor movements, titles and the like are shown.
_UNSAFE_IN_LOG = re.compile(r"(\x1b\[[0-9;]*m|[\n\t]|\r(?=\n))|([\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069])")
_COMMAND = re.compile(r"^(\s*)::|##\[", re.MULTILINE)

Cell = str | tuple[str, str]
"""Text, or text and its style."""


def styled(text: str, style: str = "") -> Text:
    """Text for rich that is never read as markup."""
    made = Text(visible(text))
    made.stylize(style)
    return made


def say(text: str = "") -> None:
    """A remark for the person: one line on standard error."""
    _write(sys.stderr, visible(text) + "\n")


def say_error(message: str, hint: str | None = None) -> None:
    """What is wrong and what to do; further lines are indented, so that none passes for another message."""
    first, *more = message.splitlines() or [""]
    say(f"error: {first}")
    for line in more:
        say(f"  {line}")
    for line in (hint or "").splitlines():
        say(f"  hint: {line}")


def put(text: str = "") -> None:
    """One line of the answer, on standard output."""
    _write(sys.stdout, visible(text) + "\n")


def put_command(line: str) -> None:
    """A workflow command of GitHub Actions, on standard output; whoever made it has escaped what is in it."""
    _write(sys.stdout, visible(line) + "\n", commands=True)


def say_command(line: str) -> None:
    """The same on standard error, which GitHub reads, too."""
    _write(sys.stderr, visible(line) + "\n", commands=True)


def put_json(value: Any) -> None:
    """The answer for a program: one document on standard output."""
    _write(sys.stdout, _json(value, indent=2) + "\n")


def put_json_line(value: Any) -> None:
    """One of many documents, a line each."""
    _write(sys.stdout, _json(value, indent=None) + "\n")


def _json(value: Any, indent: int | None) -> str:
    unicode = "utf" in (sys.stdout.encoding or "").lower() if sys.stdout else True
    text = _dump(value, indent, unicode)
    # These occur within strings only, where JSON takes \uXXXX for them; line breaks are layout.
    text = UNSAFE.sub(lambda m: m[0] if m[0] == "\n" else f"\\u{ord(m[0]):04x}", text)
    return text.replace("##[", "\\u0023#[") if _on_github() else text


def _dump(value: Any, indent: int | None, unicode: bool) -> str:
    """With pydantic's writer, which is several times as quick for what is indented; where it cannot, Python's."""
    if unicode and indent is not None:
        with suppress(ValueError):  # a surrogate, for one
            return to_json(value, indent=indent, fallback=str).decode()
    return json.dumps(value, indent=indent, ensure_ascii=not unicode, default=str)


def put_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], wrap: str | None = None) -> None:
    """Aligned columns on standard output; on a narrow terminal the column `wrap` goes over several lines.

    Nothing is ever cut, and words stay whole, so that names and digests can be copied.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(header), header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name != wrap, overflow="fold")
    for row in rows:
        table.add_row(*(styled(*((cell,) if isinstance(cell, str) else cell)) for cell in row))
    _put_rich(table)


def _put_rich(table: Table) -> None:
    """A table of rich on standard output, as wide as the terminal unless its words need more."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=100_000))
    console.width = max(terminal_columns(), needed.minimum, 1)
    with console.capture() as captured:
        console.print(table)
    _write(sys.stdout, "".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def terminal_columns() -> int:
    """How wide the terminal at standard output is; very wide where there is none."""
    return Console().width if sys.stdout is not None and sys.stdout.isatty() else 100_000


def put_bytes(data: bytes) -> None:
    """Output of a guest on standard output: byte for byte, but on a terminal only what is harmless there."""
    if sys.stdout is None:
        return
    if sys.stdout.isatty():
        shown = _UNSAFE_IN_LOG.sub(lambda m: m[1] or escape(m[2]), data.decode("utf-8", "replace"))
        _write(sys.stdout, shown)
        return
    sys.stdout.flush()
    with suppress_closed(sys.stdout):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def error_console() -> Console:
    """For what is redrawn while a job runs."""
    return Console(stderr=True)


def keep_going_on_odd_terminals() -> None:
    """A terminal that cannot show a character gets an escape of it, not a crash."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _without_commands(text: str) -> str:
    """GitHub Actions obeys a line of a step's output that begins with `::`, or holds `##[`: no name may."""
    return _COMMAND.sub(lambda m: f"{m[1]}\\x3a\\x3a" if m[1] is not None else "##\\x5b", text)


def _write(stream: TextIO | None, text: str, *, commands: bool = False) -> None:
    if stream is None:  # started with it closed
        return
    with suppress_closed(stream):
        stream.write(text if commands or not _on_github() else _without_commands(text))
        stream.flush()


class suppress_closed:
    """Do without a reader that went away (`dayfly list | head`, a closed terminal).

    The work goes on, and the exit code still tells how it ended.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        gone = isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno == 5)
        if gone:
            # What is still in the buffer must go somewhere, or the interpreter complains at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        return gone
