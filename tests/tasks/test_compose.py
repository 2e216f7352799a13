"""environment/docker-compose.yaml: what of it a VM can be, and that nothing of it is ever ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import TaskError
from dayfly.model import Healthcheck, Task
from dayfly.tasks import load_task
from dayfly.tasks.compose import (
    find_compose,
    interpolate,
    is_idle,
    parse_compose_duration,
    read_compose,
    split_command,
    with_compose,
)

HARBORS_OWN = """\
services:
  main:
    build:
      context: ${CONTEXT_DIR}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${TEST_DIR}
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - ${HOST_AGENT_LOGS_PATH}:${ENV_AGENT_LOGS_PATH}
    deploy:
      resources:
        limits:
          cpus: ${CPUS}
          memory: ${MEMORY}
"""


@pytest.fixture
def compose(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "environment" / "docker-compose.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def main_with(line: str) -> str:
    return f"services:\n  main:\n    image: acme/base:1\n    {line}\n"


def test_the_file_that_harbor_writes_adds_nothing(compose):
    found = read_compose(compose(HARBORS_OWN))
    assert (found.image, found.build, found.workdir, found.user, found.healthcheck) == (None,) * 5
    assert found.env == {"TEST_DIR": "/tests"}


def test_every_key_that_a_vm_can_honour_arrives(compose):
    text = """\
services:
  main:
    image: acme/base:1
    container_name: whatever
    command: sleep infinity
    working_dir: /srv
    user: 1000
    environment:
      PLAIN: text
      NUMBER: 12
      OCTAL: 0755
      YES: yes
      BOOL: true
      TIME: 12:30
      COST: 5$$
      PASSED:
      FROM_HOST: ${TOKEN:-none}
      WHERE: ${TEST_DIR}/data
    healthcheck:
      test: curl -f http://localhost:$$PORT/
      interval: 1.5s
      timeout: 1m30s
      start_period: 60s
      start_interval: 250ms
      retries: 7
"""
    found = read_compose(compose(text))
    assert (found.image, found.workdir, found.user) == ("acme/base:1", "/srv", "1000")
    assert found.env == {
        "PLAIN": "text",
        "NUMBER": "12",
        "OCTAL": "755",
        "YES": "yes",
        "BOOL": "true",
        "TIME": "12:30",
        "COST": "5$",
        "PASSED": "${PASSED}",
        "FROM_HOST": "${TOKEN:-none}",
        "WHERE": "/tests/data",
    }
    assert found.healthcheck == Healthcheck(
        command="curl -f http://localhost:$PORT/",
        interval_s=1.5,
        timeout_s=90.0,
        start_period_s=60.0,
        start_interval_s=0.25,
        retries=7,
    )


@pytest.mark.parametrize("mode", ["none", "bridge", "${NETWORK_MODE:-bridge}"])
def test_the_usual_network_is_no_request(compose, mode):
    assert read_compose(compose(main_with(f"network_mode: '{mode}'"))) == read_compose(
        compose(main_with("tty: true"))
    )


def test_environment_as_a_list(compose):
    found = read_compose(compose(main_with("environment: [A=1, B=x=y, C=, D]")))
    assert found.env == {"A": "1", "B": "x=y", "C": "", "D": "${D}"}


@pytest.mark.parametrize(
    ("test", "command"),
    [
        ('["CMD", "pg_isready", "-U", "some one"]', "pg_isready -U 'some one'"),
        ('["CMD-SHELL", "a || exit 1"]', "a || exit 1"),
        ("a || exit 1", "a || exit 1"),
    ],
)
def test_health_check_commands_and_dockers_defaults(compose, test, command):
    found = read_compose(compose(main_with(f"healthcheck: {{test: {test}}}")))
    assert found.healthcheck == Healthcheck(
        command=command, interval_s=30, timeout_s=30, start_period_s=0, start_interval_s=5, retries=3
    )


@pytest.mark.parametrize("off", ["{disable: true}", '{test: ["NONE"]}', '{test: ["CMD", "x"], disable: true}'])
def test_a_health_check_that_is_switched_off(compose, off):
    assert read_compose(compose(main_with(f"healthcheck: {off}"))).healthcheck is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "services: {main: {}, desk: {image: d}, ledger: {image: l}}",
            "services.desk, services.ledger: this version runs the service `main` only",
        ),
        ("services: {web: {image: x}}", "services.web"),
        (main_with("ports: ['80:80']"), "services.main.ports"),
        (main_with("volumes: ['./data:/data']"), "services.main.volumes: './data:/data'"),
        (main_with("depends_on: [db]"), "services.main.depends_on"),
        (main_with("privileged: true"), "services.main.privileged"),
        (main_with("env_file: .env"), "services.main.env_file"),
        (main_with("enviroment: {A: b}"), "services.main.enviroment"),
        (main_with("command: python server.py"), "services.main.command: 'python server.py' would not be started"),
        (main_with("entrypoint: /start.sh"), "services.main.entrypoint"),
        (main_with("network_mode: host"), "services.main.network_mode"),
        (main_with("platform: linux/arm64"), "services.main.platform"),
        (main_with("mem_limit: 2g"), "services.main.mem_limit: sizes are read from task.toml only"),
        (main_with("deploy: {resources: {limits: {pids: 3}}}"), "services.main.deploy.resources.limits.pids"),
        (main_with("deploy: {replicas: 2}"), "services.main.deploy.replicas"),
        (main_with("build: {context: ../elsewhere}"), "services.main.build.context"),
        (main_with("build: {context: 'https://example.org/x.git'}"), "services.main.build.context"),
        (main_with("build: {context: ., args: {A: b}}"), "services.main.build.args"),
        (main_with("environment: {A: 'x${OTHER}y'}"), "services.main.environment.A: the variable OTHER"),
        (main_with("working_dir: app"), "services.main.working_dir"),
        (main_with("healthcheck: {test: x, intervall: 3s}"), "did you mean interval?"),
        (main_with("healthcheck: {test: x, interval: 5}"), "healthcheck: interval: 5 is not a duration"),
        (main_with("healthcheck: {test: ['curl', 'x']}"), "healthcheck: test: a list is [CMD"),
        (main_with("healthcheck: {interval: 3s}"), "healthcheck: test: None"),
        (main_with("user: [a]"), "services.main.user"),
        (main_with("user: a\n    user: b"), "the key 'user' twice"),
        ("services: {main: {image: x}}\nvolumes: {data: {}}", "volumes: a VM has no such thing"),
        ("services: [main]", "services is not a table"),
        ("a: [", "is not YAML"),
        ("", "the file is not a table"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(compose, text, named):
    with pytest.raises(TaskError) as refused:
        read_compose(compose(text))
    assert named in str(refused.value)


def test_a_build_of_a_folder_within_environment(compose):
    path = compose("services: {main: {build: {context: ./app, dockerfile: Dockerfile.dev}, image: acme/app}}")
    with pytest.raises(TaskError, match="does not exist"):
        read_compose(path)
    (path.parent / "app").mkdir()
    (path.parent / "app/Dockerfile.dev").write_text("FROM scratch\n")
    found = read_compose(path)
    assert (found.build, found.image) == (path.parent / "app/Dockerfile.dev", None)


def test_a_file_of_no_bounds_is_refused(compose):
    with pytest.raises(TaskError, match="larger than"):
        read_compose(compose("# " + "x" * 300_000))


@pytest.mark.parametrize("key", ["deploy", "volumes", "command", "user", "healthcheck", "environment"])
def test_aliases_that_multiply_neither_hang_nor_fill_memory(compose, key):
    lines = ["x-0: &a0 {k: v}"]
    lines += [f"x-{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(9))}}}" for n in range(1, 30)]
    with pytest.raises(TaskError) as refused:
        read_compose(compose("\n".join(lines) + f"\nservices: {{main: {{{key}: *a29}}}}\n"))
    assert len(str(refused.value)) < 4000


def test_only_names_that_compose_looks_for(tmp_path):
    (tmp_path / "docker-compose.yml.bak").write_text("")
    assert find_compose(tmp_path) is None
    (tmp_path / "compose.yml").write_text("")
    assert find_compose(tmp_path) == tmp_path / "compose.yml"


# --- together with task.toml ---------------------------------------------------------------------


def task(tmp_path: Path, **fields: object) -> Task:
    return Task(name="t", digest="", path=tmp_path, instruction="", **{"image": None, **fields})


def test_task_toml_wins_over_the_compose_file(compose, tmp_path):
    text = main_with("environment: {A: compose, B: compose}\n    user: app\n    working_dir: /srv")
    found = read_compose(compose(text))
    joined = with_compose(task(tmp_path, env={"B": "toml"}, workdir="/app", verifier_user="root"), found)
    assert (joined.image, joined.workdir) == ("acme/base:1", "/app")
    assert joined.env == {"A": "compose", "B": "toml"}
    assert (joined.agent_user, joined.verifier_user) == ("app", "root")


def test_two_images_or_two_health_checks_are_refused(compose, tmp_path):
    found = read_compose(compose(main_with("healthcheck: {test: x}")))
    with pytest.raises(TaskError, match="another image than"):
        with_compose(task(tmp_path, image="acme/base:2"), found)
    with pytest.raises(TaskError, match="are both there"):
        with_compose(task(tmp_path, healthcheck=Healthcheck(command="y")), found)
    assert with_compose(task(tmp_path, image="acme/base:1"), found).healthcheck is not None


def test_a_task_folder_with_a_compose_file_is_loaded(compose, tmp_path):
    compose(main_with("user: app\n    working_dir: /srv\n    environment: {A: b}"))
    (tmp_path / "task.toml").write_text('[environment]\nenv = {A = "toml"}\n')
    (tmp_path / "instruction.md").write_text("Work.\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text("#!/bin/sh\n")
    loaded = load_task(tmp_path, strict=True)
    assert (loaded.image, loaded.dockerfile, loaded.environment_files) == ("acme/base:1", None, None)
    assert (loaded.workdir, loaded.agent_user, loaded.verifier_user) == ("/srv", "app", "app")
    assert loaded.env == {"A": "toml"}
    compose("services: {main: {build: .}}")
    (tmp_path / "environment/Dockerfile").write_text("FROM scratch\n")
    assert load_task(tmp_path, strict=True).dockerfile == tmp_path / "environment/Dockerfile"
    compose("services: {main: {}, db: {image: postgres}}")
    with pytest.raises(TaskError, match=r"services\.db"):
        load_task(tmp_path, strict=False)


# --- values of the specification -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1m30s", 90), ("1.5s", 1.5), ("2h32m", 9120), ("500ms", 0.5), ("10us", 1e-5), ("0", 0)],
)
def test_durations(text, seconds):
    assert parse_compose_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "1d", "1 s", "s", "-1s", "1m30", "1,5s", 5, None, True])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_compose_duration(text)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(1, 59))
def test_durations_add_up(hours, minutes, seconds):
    assert parse_compose_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


def test_interpolation():
    values = {"A": "a", "EMPTY": ""}
    assert interpolate("$A ${A} $$A ${B:-b} ${EMPTY:-e} ${EMPTY-e} ${A:+x}${B+x}", values) == "a a $A b e  x"
    for text in ("${B}", "$B", "${A", "$(date)", "5$", "${B:?must be set}"):
        with pytest.raises(ValueError):
            interpolate(text, values)


def test_commands_are_split_as_a_shell_splits_but_by_no_shell():
    assert split_command("python -c 'print(1)' \"a b\" $HOME") == ("python", "-c", "print(1)", "a b", "$HOME")
    assert split_command(["sh", "-c", "a b"]) == ("sh", "-c", "a b")
    assert split_command("'") is None and split_command(3) is None
    assert is_idle(("tail", "-f", "/dev/null")) and is_idle(("bash", "-c", "sleep infinity")) and is_idle(("bash",))
    assert not is_idle(("sleep", "10")) and not is_idle(("sh", "-c", "start; sleep infinity"))
