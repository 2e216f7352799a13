"""The documentation tells the truth: commands exist, options exist, examples parse, files are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from dayfly.cli import app
from dayfly.job import load_job_file

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SPECIFICATION.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP = typer.main.get_command(app)


def commands() -> dict[str, object]:
    """Every command by its words, like `image import`."""
    found = {}
    for name, command in GROUP.commands.items():
        below = getattr(command, "commands", None)
        if below:
            found |= {f"{name} {sub}": c for sub, c in below.items()}
        else:
            found[name] = command
    return found


def used_commands() -> list[tuple[str, str]]:
    """(page, command line) for each `dayfly …` in the pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"(?:^\$ |`)(dayfly [^`\n]*)", text, re.MULTILINE):
            found.append((page.name, match[1].split("#")[0].strip()))
    return found


def test_every_command_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    missing = [c for c in commands() if not re.search(rf"dayfly {c}\b", text)]
    assert missing == [], "commands that README.md does not mention"


@pytest.mark.parametrize(("page", "line"), used_commands())
def test_every_command_line_in_the_pages_exists(page, line):
    words = line.split()[1:]
    name = " ".join(words[:2]) if " ".join(words[:2]) in commands() else words[0]
    assert name in commands() or name.startswith("-"), f"{page}: {line}"
    if name in commands():
        known = {o for p in commands()[name].params for o in [*p.opts, *p.secondary_opts]} | {"--help", "-h"}
        for word in words:
            if word == "--":
                break
            if word.startswith("-") and word != "-":
                assert word.split("=")[0] in known, f"{page}: {line}: {word}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_paths_named_in_the_pages_exist():
    for page in PAGES:
        for path in re.findall(r"`((?:src|tests|benchmarks|scripts|examples|guest)/[\w./-]+)`", page.read_text()):
            if path != "tests/test.sh":  # of a task, not of this project
                assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/job.yaml")), ids=str)
def test_example_jobs_parse(path):
    assert load_job_file(path).tasks


def test_every_folder_with_more_than_three_modules_says_what_is_in_it():
    for folder in {p.parent for p in (ROOT / "src").rglob("*.py")}:
        modules = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
        if len(modules) > 3:
            readme = folder / "README.md"
            assert readme.exists(), f"{folder.relative_to(ROOT)} has no README.md"
            text = readme.read_text()
            missing = [m.name for m in modules if m.name != "__main__.py" and m.name not in text]
            assert missing == [], f"{readme.relative_to(ROOT)} does not mention them"


def test_importing_does_nothing():
    """No output, and no file opened for writing, by importing every module."""
    code = (
        "import sys, pkgutil, importlib\n"
        "opened = []\n"
        "def watch(event, args):\n"
        "    if event == 'open' and args[1] is not None and set(args[1]) & set('wax+'):\n"
        "        opened.append(args[0])\n"
        "    if event == 'subprocess.Popen':\n"
        "        opened.append(args[0])\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(watch)\n"
        "import dayfly\n"
        "for m in pkgutil.walk_packages(dayfly.__path__, 'dayfly.'):\n"
        "    if not m.name.endswith('__main__') and '.migrations' not in m.name:\n"
        "        importlib.import_module(m.name)\n"
        "assert not opened, opened\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"" and done.stderr == b""


@pytest.mark.parametrize("name", ["job", "task", "rollout", "gate", "quarantine"])
def test_published_schemas_are_current(name, tmp_path):
    script = ROOT / "scripts/write-schemas"
    code = f"import runpy; print(runpy.run_path({str(script)!r})['text_of']('{name}.schema.json'), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    published = (ROOT / f"docs/schemas/{name}.schema.json").read_text()
    assert done.stdout.decode() == published, "run scripts/write-schemas"
