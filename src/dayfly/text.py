"""Text that an agent or a task controls, made fit to be shown: in a terminal, HTML, Markdown, XML or a log."""

from __future__ import annotations

import re

# C0 and C1 controls, line separators, what reorders or hides text, and half characters that no encoding has.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """The text on one line, with every character that is not plain text written as an escape.

    The result can be encoded as UTF-8 and holds no character that XML 1.0 forbids.
    Markup (`<`, `|`, `[red]`, `::`) is left alone: that is for the writer of the format.
    """
    return UNSAFE.sub(lambda m: _NAMES.get(m[0]) or escape(m[0]), text)


def escape(character: str) -> str:
    """One character of the basic plane as `\\xNN` or `\\uNNNN`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
