"""Terminal-Bench 1 folders in Harbor's layout: nothing lost silently, the same verdict."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dayfly.errors import ConfigError, NotFoundError, TaskError
from dayfly.importers import find_terminal_bench, import_terminal_bench
from dayfly.importers.terminal_bench import TEST_SCRIPTS
from dayfly.importers.write import to_toml
from dayfly.tasks import load_task

TASK_YAML = """\
instruction: |-
  Write `done` into
  /app/result.txt.
author_name: A. Uthor
difficulty: easy
tags: [files, "a \\"quoted\\" tag"]
parser_name: pytest
max_agent_timeout_sec: 120.0
max_test_timeout_sec: 30
run_tests_in_same_shell: false
"""
COMPOSE = """\
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
FILES = {
    "task.yaml": TASK_YAML,
    "docker-compose.yaml": COMPOSE,
    "Dockerfile": "FROM debian:13\nWORKDIR /app\nCOPY data /app/data\n",
    "data/input.txt": "text\n",
    "run-tests.sh": "#!/bin/bash\npytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_it(): pass\n",
    "solution.sh": "#!/bin/sh\necho done > /app/result.txt\n",
}


@pytest.fixture
def original(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "write-it", **changes: str | None) -> Path:
        folder = tmp_path / "old" / name
        for path, text in {**FILES, **changes}.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_an_ordinary_task_loads_and_nothing_is_lost(original, tmp_path):
    made = import_terminal_bench(original(), tmp_path / "new")
    assert made.name == "write-it" and made.path == tmp_path / "new/write-it"
    assert files_in(made.path) == [
        "environment/Dockerfile",
        "environment/data/input.txt",
        "instruction.md",
        "solution/solve.sh",
        "task.toml",
        "tests/run-tests.sh",
        "tests/test.sh",
        "tests/test_outputs.py",
    ]
    task = load_task(made.path, strict=True)
    assert task.instruction == "Write `done` into\n/app/result.txt.\n"
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.verifier_class) == (120, 30, "shared")
    assert task.dockerfile == made.path / "environment/Dockerfile"
    assert task.env == {"TEST_DIR": "/tests"} and task.network == {"environment": "public"}
    assert task.metadata["tags"] == ["files", 'a "quoted" tag'] and task.metadata["author_name"] == "A. Uthor"
    assert (task.solution / "solve.sh").read_text().startswith("#!/bin/bash\n"), "bash runs it, as it did"
    assert list((tmp_path / "new").iterdir()) == [made.path]


def test_what_the_client_service_says_is_kept(original, tmp_path):
    text = COMPOSE.replace(
        "    environment:\n", "    working_dir: /srv\n    user: app\n    environment:\n      - MODE=x\n"
    )
    made = import_terminal_bench(original(**{"docker-compose.yaml": text}), tmp_path / "new")
    task = load_task(made.path, strict=True)
    assert (task.workdir, task.agent_user) == ("/srv", "app")
    assert task.env == {"MODE": "x", "TEST_DIR": "/tests"}


def test_a_service_without_a_network_says_so(original, tmp_path):
    text = COMPOSE + "    network_mode: none\n    labels: {a: b}\n"
    made = import_terminal_bench(original(**{"docker-compose.yaml": text}), tmp_path / "new")
    assert load_task(made.path, strict=True).network == {"environment": "no-network"}


def test_a_context_in_a_subfolder_and_a_dockerfile_of_another_name(original, tmp_path):
    text = "services:\n  web:\n    build: {context: ./image, dockerfile: Dockerfile.web}\n"
    files = {"docker-compose.yaml": text, "Dockerfile": None, "image/Dockerfile.web": "FROM x\n", "image/a": "a"}
    made = import_terminal_bench(original(**files), tmp_path / "new")
    assert {"environment/Dockerfile", "environment/a"} <= set(files_in(made.path))
    assert not (made.path / "environment/data").exists()


def test_tests_that_the_dockerfile_itself_copies_stay_and_are_remarked_on(original, tmp_path):
    dockerfile = "FROM debian:13\nCOPY ./tests/ /app/tests\nCOPY --chown=app \\\n  solution.sh /x\n"
    made = import_terminal_bench(original(Dockerfile=dockerfile), tmp_path / "new")
    assert {"environment/tests/test_outputs.py", "environment/solution.sh"} <= set(files_in(made.path))
    assert sum("an agent can read it" in r for r in made.remarks) == 2


def test_the_older_form_of_instructions_and_typed_solutions(original, tmp_path):
    yaml = "descriptions:\n  - {key: hard, description: other}\n  - {key: base, description: yes please}\n"
    typed = "- {command: cd /app, block: true}\n- {command: 'echo done > result.txt', block: true}\n"
    files = {"task.yaml": yaml, "solution.sh": None, "solution.yaml": typed, "docker-compose.yaml": None}
    made = import_terminal_bench(original(**files), tmp_path / "new")
    task = load_task(made.path, strict=True)
    assert task.instruction == "yes please\n"
    assert (task.solution / "solve.sh").read_text() == "#!/bin/bash\ncd /app\necho done > result.txt\n"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task.yaml": TASK_YAML.replace("pytest", "mlebench")}, "task.yaml: parser_name: 'mlebench'"),
        ({"task.yaml": TASK_YAML.replace("shell: false", "shell: true")}, "run_tests_in_same_shell"),
        ({"task.yaml": TASK_YAML.replace("120.0", "soon")}, "max_agent_timeout_sec"),
        ({"task.yaml": "difficulty: easy\n"}, "there is no instruction"),
        ({"task.yaml": "a: ["}, "is not YAML"),
        ({"docker-compose.yaml": COMPOSE + "  db: {image: postgres}\n"}, "services.db: this version runs one"),
        ({"docker-compose.yaml": COMPOSE + "    ports: ['80:80']\n"}, "services.main.ports"),
        ({"docker-compose.yaml": COMPOSE + "networks: {a: {}}\n"}, "docker-compose.yaml: networks"),
        (
            {"docker-compose.yaml": COMPOSE.replace("dockerfile: Dockerfile", "args: {A: b}")},
            "services.main.build.args",
        ),
        ({"docker-compose.yaml": "services: {client: {build: ../..}}\n"}, "build.context"),
        ({"docker-compose.yaml": COMPOSE + "    network_mode: host\n"}, "services.main.network_mode: 'host'"),
        ({"Dockerfile": None}, "there is no ./Dockerfile"),
        ({"run-tests.sh": None}, "run-tests.sh does not exist"),
        ({"tests/test.sh": "exit\n"}, "tests/test.sh: has a meaning of its own"),
        (
            {"solution.sh": None, "solution.yaml": "- {command: i, block: true, append_enter: false}"},
            "command 1: 'i'",
        ),
        ({"solution.sh": None, "solution.yaml": "- {command: vim}"}, "command 1: 'vim'"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name_and_leaves_nothing(original, tmp_path, changes, named):
    source = original(**changes)
    with pytest.raises(TaskError) as refused:
        import_terminal_bench(source, tmp_path / "new")
    assert named in refused.value.message and str(source) in refused.value.message
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_a_link_out_of_the_task_is_refused(original, tmp_path):
    source = original()
    (source / "data/passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="outside of the task folder"):
        import_terminal_bench(source, tmp_path / "new")


def test_nothing_is_overwritten_without_force(original, tmp_path):
    source, to = original(), tmp_path / "new"
    import_terminal_bench(source, to)
    (to / "write-it/mine").write_text("")
    with pytest.raises(ConfigError, match="exists"):
        import_terminal_bench(source, to)
    (source / "run-tests.sh").unlink()
    with pytest.raises(TaskError):
        import_terminal_bench(source, to, force=True)
    assert (to / "write-it/mine").exists(), "what could not be replaced stays"
    (source / "run-tests.sh").write_text("true\n")
    import_terminal_bench(source, to, force=True)
    assert not (to / "write-it/mine").exists()


def test_finding_tasks(original, tmp_path):
    one, two = original("one"), original("two")
    assert find_terminal_bench([tmp_path / "old"]) == [one, two]
    assert find_terminal_bench([two]) == [two]
    with pytest.raises(NotFoundError):
        find_terminal_bench([tmp_path])


# --- the verdict ---------------------------------------------------------------------------------


def reward(tmp_path: Path, parser: str, printed: str, status: int = 0) -> str | None:
    """What tests/test.sh writes when the task's own tests print this; it runs here, with its places moved."""
    for name in ("tests", "logs/verifier"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tests/run-tests.sh").write_text(f"cat <<'END'\n{printed}\nEND\nexit {status}\n")
    text = TEST_SCRIPTS[parser].replace("/tests/", f"{tmp_path}/tests/").replace("/logs/", f"{tmp_path}/logs/")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert printed.replace("\r", "") in done.stdout
    found = tmp_path / "logs/verifier/reward.txt"
    return found.read_text() if found.exists() else None


SUMMARY = "=========================== short test summary info ============================\n"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (SUMMARY + "PASSED tests/a.py::test_a\nPASSED tests/a.py::test_b", "1\n"),
        (SUMMARY + "PASSED a::x\nXFAIL a::z - why\nSKIPPED [1] a.py:3: later\n=== 3 passed ===", "1\n"),
        (SUMMARY + "PASSED a::x\nFAILED a::y - AssertionError: PASSED\n1 failed", "0\n"),
        (SUMMARY + "ERROR tests/a.py - ModuleNotFoundError", "0\n"),
        (SUMMARY + "PASSED a::x\nXPASS a::y", "0\n"),
        ("PASSED a::x\n" + SUMMARY + "FAILED: a::y", "0\n"),
        (SUMMARY.replace("short test summary info", "Short Test Summary Info") + "PASSED a::x\r", "1\n"),
        (SUMMARY + "=== no tests ran ===", None),
        ("PASSED a::x", None),
        ("curl: (6) Could not resolve host", None),
        ("", None),
    ],
)
def test_the_verdict_is_that_of_pytests_summary(tmp_path, printed, expected):
    assert reward(tmp_path, "pytest", printed, status=0 if expected == "1\n" else 1) == expected


@pytest.mark.parametrize(
    ("inside", "expected"),
    [("\nPASSED\n", "1\n"), ("\nFAILED\n", "0\n"), ("\nPASSED\nFAILED\n", "0\n"), (None, None)],
)
def test_the_verdict_of_tasks_adapted_from_swebench(tmp_path, inside, expected):
    printed = f"SWEBench results starts here{inside}SWEBench results ends here" if inside else "nothing"
    assert reward(tmp_path, "swebench", printed) == expected


# --- TOML ----------------------------------------------------------------------------------------


def test_toml_says_what_it_was_given():
    data = {
        "a": 1,
        "b": 1.5,
        "text": 'a "b" \\ \n\t\x7f é 😀',
        "no": False,
        "odd key": [1, "x", {"in": "line"}],
        "table": {"x.y": {"z": []}, "empty": {}},
        "tables": [{"a": 1, "in": {"b": 2}}, {"a": 2}],
    }
    assert tomllib.loads(to_toml({**data, "left out": None})) == data
