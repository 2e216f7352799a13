"""Within GitHub Actions, no name of a task or agent gives the runner orders; elsewhere names stay as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

NAMES = [
    "::error::planted",
    "  ::add-mask::x",
    "\u00a0::stop-commands::y",
    "a ##[error]planted",
    "###[group]z",
    "plain",
]
CODE = """
import json, sys
from dayfly.cli.output import put, put_command, put_json, put_json_line, put_table, say, say_error
names = json.loads(sys.argv[1])
for name in names:
    put(name); say(name); say_error("first\\n" + name, name)
    put_table(("", ""), [(name, name)])
put_json({n: [n] for n in names}); put_json_line(names)
put_command("::notice title=x::meant")
"""


def output(names: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CODE, json.dumps(names)]
    bare = {k: v for k, v in os.environ.items() if k != "GITHUB_ACTIONS"} | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run(argv, env=bare | env, capture_output=True, encoding="utf-8", timeout=60, check=True)


def obeyed(text: str) -> list[str]:
    """Lines that the runner takes for commands: by `::` after white space, or by `##[` anywhere."""
    return [line for line in text.split("\n") if line.lstrip().startswith("::") or "##[" in line]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_name_is_obeyed(stream):
    text = getattr(output(NAMES, GITHUB_ACTIONS="true"), stream)
    assert obeyed(text) == (["::notice title=x::meant"] if stream == "stdout" else [])
    assert "planted" in text


def test_json_means_the_same():
    for env in ({}, {"GITHUB_ACTIONS": "true"}):
        text = output(NAMES, **env).stdout
        line = next(x for x in text.split("\n") if x.startswith("["))
        assert json.loads(line) == NAMES
        document = re.search(r"^\{\n.*?^\}", text, re.MULTILINE | re.DOTALL)[0]
        assert json.loads(document) == {n: [n] for n in NAMES}


def test_elsewhere_names_are_as_they_are():
    assert len(obeyed(output(NAMES).stdout)) > 5
