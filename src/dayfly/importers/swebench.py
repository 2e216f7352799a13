"""SWE-bench instances (rows of a JSONL file) as task folders in Harbor's layout, and predictions as a job.

A task is judged as SWE-bench judges: what the agent changed in the repository is taken as a patch, applied to a
fresh copy of the image, the instance's test patch over it, and the reward is 1 when every test of FAIL_TO_PASS
and PASS_TO_PASS passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dayfly.errors import ConfigError, TaskError
from dayfly.importers.write import Imported, new_task, to_toml, write_program

DEFAULT_IMAGE = "swebench/sweb.eval.x86_64.{image_id}:latest"
"""SWE-bench's own name for the image of an instance."""
MAX_LINE = 64 * 1024 * 1024
WORKDIR = "/testbed"


@dataclass(frozen=True)
class TestCommand:
    """How a repository's tests are run, and which parser reads what they print."""

    __test__ = False  # no test of ours, whatever pytest thinks of the name
    line: str
    parser: str = "pytest"


PYTEST = TestCommand("pytest --no-header -rA --tb=no -p no:cacheprovider")
COMMANDS = {
    "django/django": TestCommand(
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1", "unittest"
    ),
    "sympy/sympy": TestCommand("bin/test -C --verbose", "sympy"),
    "sphinx-doc/sphinx": TestCommand("tox --current-env -epy39 -v --"),
    "mwaskom/seaborn": TestCommand("pytest --no-header -rA"),
    "astropy/astropy": TestCommand("pytest -rA -vv -o console_output_style=classic --tb=no"),
}
"""Repositories of SWE-bench whose tests are not run by plain pytest."""
PARSERS = ("pytest", "unittest", "sympy")
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst")


def _tests(value: Any) -> Any:
    """A list of names, or the JSON text of one, as the data sets have it."""
    return json.loads(value) if isinstance(value, str) else value


TestNames = Annotated[tuple[str, ...], BeforeValidator(_tests)]


class Instance(BaseModel):
    """A row. Keys that decide nothing are not read."""

    model_config = ConfigDict(extra="ignore")
    instance_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,199}$")]
    repo: str
    base_commit: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{7,64}$")]
    problem_statement: Annotated[str, Field(min_length=1)]
    test_patch: str = ""
    patch: str = ""
    version: str | None = None
    fail_to_pass: Annotated[TestNames, Field(min_length=1, validation_alias="FAIL_TO_PASS")]
    pass_to_pass: Annotated[TestNames, Field(validation_alias="PASS_TO_PASS")] = ()
    image: Annotated[str | None, Field(validation_alias=AliasChoices("docker_image", "image_name"))] = None
    test_cmd: str | None = None


class Prediction(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    instance_id: str
    model_name_or_path: Annotated[str, Field(min_length=1)]
    model_patch: str | None = None


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    image_template: str | None = None
    """`{instance_id}`, `{image_id}` (lower case, `__` → `_1776_`), `{repo}` and `{version}` are filled in."""
    test_command: str | None = None
    parser: str = "pytest"
    """Of `test_command`."""
    agent_timeout_s: float = 3600.0
    verifier_timeout_s: float = 1800.0
    cpus: int = 1
    memory_mb: int = 4096
    storage_mb: int = 10240


def settings(image_template: str | None, test_command: str | None, parser: str) -> Settings:
    """As written on a command line. Raises `ConfigError` for an unknown parser."""
    if parser not in PARSERS:
        raise ConfigError(f"there is no parser called {parser!r}", hint=f"known: {', '.join(PARSERS)}")
    return Settings(image_template=image_template, test_command=test_command, parser=parser)


def import_swebench(
    source: Path, to: Path, settings: Settings, *, only: tuple[str, ...] = (), force: bool = False
) -> Iterator[Imported | TaskError]:
    """Make `to`/INSTANCE of every row (of those in `only`); a row that cannot be carried over is its error.

    Raises `TaskError` when the file cannot be read, and `ConfigError` for an instance in `only` that is not there.
    """
    rows = list(read_rows(source))
    known = {str(row.get("instance_id")) for _, row in rows}
    missing = [name for name in only if name not in known]
    if missing:
        raise ConfigError(f"{source} holds no instance {missing[0]!r}", hint=f"it holds {len(known)} others")
    for where, row in rows:
        if only and row.get("instance_id") not in only:
            continue
        try:
            yield _import_row(row, where, to, settings, force=force)
        except TaskError as error:
            yield error


def _import_row(row: dict[str, Any], where: str, to: Path, settings: Settings, *, force: bool) -> Imported:
    instance = _validated(Instance, row, where)
    touched = touched_by(instance.test_patch)
    command = _command(instance, settings)
    if not _named(touched):
        raise TaskError(
            f"{where}: test_patch touches no file of tests", hint="the tests to run are those that it touches"
        )
    remarks: list[str] = []
    place = to / instance.instance_id
    with new_task(place, where, force=force, remarks=remarks) as folder:
        image = _image(instance, settings)
        (folder / "task.toml").write_text(to_toml(_task_toml(instance, image, settings)), "utf-8")
        (folder / "instruction.md").write_text(INSTRUCTION.format(text=instance.problem_statement.strip()), "utf-8")
        tests = folder / "tests"
        write_program(tests / "test.sh", _test_script(instance, command, touched))
        (tests / "test.patch").write_text(_whole(instance.test_patch), "utf-8", newline="\n")
        expected = {
            "parser": command.parser,
            "fail_to_pass": instance.fail_to_pass,
            "pass_to_pass": instance.pass_to_pass,
        }
        (tests / "expected.json").write_text(json.dumps(expected, indent=1), "utf-8")
        (tests / "grade.py").write_text(files("dayfly.importers").joinpath("swebench_grade.py").read_text("utf-8"))
        if instance.patch.strip():
            write_program(folder / "solution/solve.sh", SOLVE)
            (folder / "solution/gold.patch").write_text(_whole(instance.patch), "utf-8", newline="\n")
    return Imported(instance.instance_id, place, tuple(remarks))


# --- reading -------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where, and what, of a JSONL file, or of a JSON file with a list. Raises `TaskError` naming the line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"{path} cannot be read: {e}", hint="give a JSONL file, one row a line") from e
    if text.lstrip().startswith("["):
        rows = _json(text, str(path))
        numbered = ((f"{path}: row {n}", row) for n, row in enumerate(rows, 1))
    else:
        # Not splitlines: a row may hold U+2028 and the like as it is.
        lines = ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())
        numbered = ((f"{path}:{n}", _json(line, f"{path}:{n}")) for n, line in lines)
    for where, row in numbered:
        if not isinstance(row, dict):
            raise TaskError(f"{where} is not an object", hint="a row has instance_id, repo, base_commit, ...")
        yield where, row


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        raise TaskError(f"{where} is not JSON: {e}", hint="give a JSONL file, one row a line") from e


def _validated(model: type[Any], row: dict[str, Any], where: str) -> Any:
    try:
        return model.model_validate(row)
    except ValidationError as e:
        one = e.errors(include_url=False)[0]
        key = ".".join(str(part) for part in one["loc"]) or "the row"
        raise TaskError(f"{where}: {key}: {one['msg']}", hint="see SWE-bench's description of its rows") from e


_HEADER = re.compile(r"^diff --git a/(.+?) b/(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Touched:
    """The files of a patch."""

    run: tuple[str, ...]
    """Those that are there afterwards."""
    old: tuple[str, ...]
    """Those that must be as they were before it is applied."""
    new: tuple[str, ...]
    """Those that must not be there before it is applied."""


def touched_by(patch: str) -> Touched:
    run: list[str] = []
    old: list[str] = []
    new: list[str] = []
    for part in re.split(r"(?m)^(?=diff --git )", patch):
        found = _HEADER.match(part)
        if found is None:
            continue
        before, after = found[1], found[2]
        made = re.search(r"(?m)^new file mode ", part) is not None
        if not re.search(r"(?m)^deleted file mode ", part):
            run.append(after)
        if not made:
            old.append(before)
        if made or before != after:
            new.append(after)
    return Touched(tuple(run), tuple(old), tuple(new))


def _whole(patch: str) -> str:
    return patch if patch.endswith("\n") else patch + "\n"


# --- writing -------------------------------------------------------------------------------------

INSTRUCTION = f"""\
The repository in {WORKDIR} has this issue. Change the repository so that the issue is resolved. Tests that are not
shown decide.

{{text}}
"""


def _image(instance: Instance, settings: Settings) -> str:
    template = settings.image_template or instance.image or DEFAULT_IMAGE
    values = {
        "instance_id": instance.instance_id,
        "image_id": instance.instance_id.lower().replace("__", "_1776_"),
        "repo": instance.repo,
        "version": instance.version or "",
    }
    try:
        return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], template)
    except KeyError as e:
        raise ConfigError(
            f"the image template {template!r} has an unknown part {{{e.args[0]}}}",
            hint=f"known: {', '.join(f'{{{name}}}' for name in values)}",
        ) from e


def _command(instance: Instance, settings: Settings) -> TestCommand:
    if settings.test_command is not None:
        return TestCommand(settings.test_command, settings.parser)
    if instance.test_cmd is not None:
        return TestCommand(instance.test_cmd, settings.parser)
    return COMMANDS.get(instance.repo, PYTEST)


COLLECT = f"""\
mkdir -p /logs/artifacts; cd /; g() {{ git -c core.fsmonitor=false -c core.hooksPath=/dev/null \
--git-dir={WORKDIR}/.git --work-tree={WORKDIR} "$@"; }}; \
g add -A && g diff --cached --binary --no-color --no-ext-diff --no-textconv BASE \
> /logs/artifacts/model.patch || touch /logs/artifacts/unreadable"""


def _task_toml(instance: Instance, image: str, settings: Settings) -> dict[str, Any]:
    return {
        "schema_version": "1.4",
        "metadata": {
            "source_format": "swe-bench",
            "instance_id": instance.instance_id,
            "repo": instance.repo,
            "base_commit": instance.base_commit,
            "version": instance.version,
        },
        "agent": {"timeout_sec": settings.agent_timeout_s},
        "verifier": {
            "timeout_sec": settings.verifier_timeout_s,
            "environment_mode": "separate",
            "collect": [
                {"command": COLLECT.replace("BASE", instance.base_commit), "timeout_sec": 300.0, "user": "root"}
            ],
        },
        "environment": {
            "docker_image": image,
            "workdir": WORKDIR,
            "cpus": settings.cpus,
            "memory_mb": settings.memory_mb,
            "storage_mb": settings.storage_mb,
        },
        "dayfly": {"reward_range": [0, 1]},
    }


SOLVE = f"""\
#!/bin/sh
cd {WORKDIR} && git -c safe.directory='*' apply --whitespace=nowarn /solution/gold.patch
"""

TEST_SCRIPT = """\
#!/bin/bash
# Runs in a fresh VM of the instance's image: the agent's patch, then the test patch, then the tests.
# No reward at all means that the tests could not be run: that is no verdict.
cd @WORKDIR@ || exit 1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
activate=/opt/miniconda3/bin/activate
if [ -e "$activate" ]; then . "$activate" && conda activate testbed; fi

zero() { echo "$1"; echo 0 > /logs/verifier/reward.txt; exit 0; }

if [ -e /logs/artifacts/unreadable ]; then zero "the agent left no repository that can be read"; fi
if [ ! -e /logs/artifacts/model.patch ]; then echo "the agent's work did not arrive"; exit 1; fi
if [ -s /logs/artifacts/model.patch ]; then
    git apply --whitespace=nowarn /logs/artifacts/model.patch ||
        patch --batch --forward --fuzz=5 -p1 -i /logs/artifacts/model.patch ||
        zero "the agent's patch does not apply"
fi

# The tests are the instance's, whatever the agent made of them.
@RESET@
git apply --whitespace=nowarn /tests/test.patch || { echo "the test patch does not apply"; exit 1; }

log=/logs/verifier/tests.txt
@COMMAND@ > "$log" 2>&1 < /dev/null
status=$?
cat "$log"
if [ $status -eq 126 ] || [ $status -eq 127 ]; then echo "the tests cannot be started"; exit 1; fi
for python in /usr/bin/python3 python3 python; do
    if command -v "$python" > /dev/null; then exec "$python" -I /tests/grade.py "$log" "$status"; fi
done
echo "there is no Python to read the tests' output with"; exit 1
"""


def _named(touched: Touched) -> list[str]:
    """The test files that are run."""
    return [name for name in touched.run if not name.endswith(_NO_TESTS)]


def _test_script(instance: Instance, command: TestCommand, touched: Touched) -> str:
    reset = [f"rm -f -- {_words(touched.new)}"] if touched.new else []
    if touched.old:
        reset.append(f"git checkout -q {instance.base_commit} -- {_words(touched.old)} || exit 1")
    named = _named(touched)
    if command.parser == "unittest":
        named = [_label(name) for name in named]
    return (
        TEST_SCRIPT.replace("@WORKDIR@", WORKDIR)
        .replace("@RESET@", "\n".join(reset))
        .replace("@COMMAND@", f"{command.line} {_words(named)}")
    )


def _words(names: Any) -> str:
    return " ".join("'" + name.replace("'", "'\\''") + "'" for name in names)


def _label(path: str) -> str:
    """tests/forms/test_x.py → forms.test_x, as Django's own runner is told."""
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")


# --- predictions ---------------------------------------------------------------------------------


def write_predictions(predictions: Path, to: Path, names: list[str], *, force: bool = False) -> Path:
    """`to`/predictions/MODEL/INSTANCE.patch and `to`/job.yaml, which grades them: an agent for each model.

    Predictions of instances that are not in `names` are left out. Raises `TaskError` or `ConfigError`.
    """
    wanted = set(names)
    models: dict[str, dict[str, str]] = {}
    for where, row in read_rows(predictions):
        found = _validated(Prediction, row, where)
        patches = models.setdefault(found.model_name_or_path, {})
        if found.instance_id in patches:
            raise TaskError(f"{where}: a second prediction for {found.instance_id}", hint="keep one of them")
        patches[found.instance_id] = found.model_patch or ""
    job = to / "job.yaml"
    if job.exists() and not force:
        raise ConfigError(f"{job} exists", hint="--force replaces it")
    agents = []
    for model, patches in models.items():
        folder = to / "predictions" / _folder_name(model)
        folder.mkdir(parents=True, exist_ok=force)
        for name, patch in patches.items():
            if name in wanted:
                (folder / f"{name}.patch").write_text(patch, "utf-8", newline="\n")
        agents.append({"name": model, "kind": "patch", "options": {"folder": folder.relative_to(to).as_posix()}})
    text = yaml.safe_dump({"name": "predictions", "tasks": sorted(wanted), "agents": agents}, sort_keys=False)
    job.write_text(text, "utf-8")
    return job


def _folder_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", model).lstrip(".") or "_"
