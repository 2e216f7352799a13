"""task.toml as Harbor's users write it, and what dayfly says about the rest."""

from __future__ import annotations

import pytest

from dayfly.errors import TaskError
from dayfly.model import Machine, VerifierClass
from dayfly.tasks import load_task, task_json_schema

FULL = """\
schema_version = "1.3"
artifacts = ["/app/out", { source = "notes.txt", destination = "n/notes.txt", exclude = ["*.tmp"] }]
[task]
name = "acme/sum-numbers"
version = "1.2.0"
authors = [{ name = "A", email = "a@example.org" }]
[metadata]
anything = { goes = ["here"] }
[agent]
timeout_sec = 90
user = 1000
network_mode = "no-network"
[verifier]
timeout_sec = 45.5
user = "root"
env = { KEY = "${KEY}" }
[[verifier.collect]]
command = "pg_dump > /app/out/db.sql"
timeout_sec = 5
user = 0
[environment]
docker_image = "acme/base:1"
build_timeout_sec = 100
cpus = 2
memory_mb = 2048
storage_mb = 8192
network_mode = "no-network"
workdir = "/app"
env = { MODE = "x" }
[environment.healthcheck]
command = "test -e /ready"
interval_sec = 1.5
retries = 7
[solution]
env = { S = "1" }
[dayfly]
pass_reward = 0.5
reward_range = [0, 1]
tags = ["a", "b"]
"""


def test_every_field_arrives(make_task):
    task = load_task(make_task(FULL, {"environment/data.csv": "1"}), strict=True)
    assert task.name == "acme/sum-numbers"
    assert task.image == "acme/base:1" and task.dockerfile is None
    assert task.environment_files == task.path / "environment"
    assert task.machine == Machine(cpus=2, memory_mib=2048, storage_mib=8192)
    assert (task.agent_timeout_s, task.agent_user) == (90.0, "1000")
    assert (task.verifier_timeout_s, task.verifier_user, task.verifier_env) == (45.5, "root", {"KEY": "${KEY}"})
    assert task.build_timeout_s == 100 and task.workdir == "/app" and task.env == {"MODE": "x"}
    assert task.healthcheck is not None
    assert (task.healthcheck.interval_s, task.healthcheck.retries, task.healthcheck.timeout_s) == (1.5, 7, 30.0)
    hook = task.collect[0]
    assert (hook.command, hook.timeout_s, hook.user) == ("pg_dump > /app/out/db.sql", 5.0, "0")
    assert task.artifacts[0].source == "/app/out"
    assert (task.artifacts[1].destination, task.artifacts[1].exclude) == ("n/notes.txt", ("*.tmp",))
    assert task.solution_env == {"S": "1"} and task.metadata == {"anything": {"goes": ["here"]}}
    assert (task.pass_reward, task.reward_range, task.tags) == (0.5, (0.0, 1.0), ("a", "b"))
    assert task.warnings == ()


def test_defaults_are_stated(make_task):
    task = load_task(make_task(), strict=True)
    assert task.name == "one"
    assert task.machine == Machine(cpus=1, memory_mib=1024, storage_mib=4096)
    assert task.agent_timeout_s is None and task.verifier_timeout_s == 600
    assert task.verifier_class is VerifierClass.SHARED and not task.verifier_declared
    assert task.environment_files is None and task.warnings == ()


@pytest.mark.parametrize(
    ("toml", "key", "meant"),
    [
        ("[environment]\ndocker_image = 'x'\nmemroy_mb = 512", "environment.memroy_mb", "memory_mb"),
        ("artefacts = []\n[environment]\ndocker_image = 'x'", "artefacts", "artifacts"),
        ("[environment]\ndocker_image = 'x'\n[dayfly]\nverifer_class = 'rebooted'", "dayfly.verifer_class", None),
        (
            "artifacts = [{sorce = '/a', source = '/a'}]\n[environment]\ndocker_image = 'x'",
            "artifacts[0].sorce",
            "s",
        ),
        (
            "[environment]\ndocker_image = 'x'\n[[verifier.collect]]\ncommand = 'x'\nsrvice = 'x'",
            "srvice",
            "service",
        ),
    ],
)
def test_an_unknown_key_is_an_error_when_strict_and_a_warning_else(make_task, toml, key, meant):
    folder = make_task(toml)
    with pytest.raises(TaskError) as caught:
        load_task(folder, strict=True)
    assert "task.toml" in caught.value.message and key in caught.value.message
    assert caught.value.hint is not None and (meant or "verifier_class") in caught.value.hint
    warnings = load_task(folder, strict=False).warnings
    assert any(key in w and (meant or "verifier_class") in w for w in warnings)


def test_all_unknown_keys_are_named_at_once(make_task):
    folder = make_task("one = 1\ntwo = 2\n[environment]\ndocker_image = 'x'")
    with pytest.raises(TaskError, match=r"unknown key one; unknown key two"):
        load_task(folder, strict=True)


@pytest.mark.parametrize("version", ['version = "1.0"', "version = 1.0", 'schema_version = "1.2"', ""])
def test_old_spellings_are_read(make_task, version):
    legacy = "[environment]\ndocker_image = 'x'\nmemory = '2G'\nstorage = '512M'\nallow_internet = false"
    task = load_task(make_task(f"{version}\n{legacy}"), strict=True)
    assert task.machine == Machine(memory_mib=2048, storage_mib=512)
    assert len(task.warnings) == 2  # the two sizes, for their spelling


def test_a_schema_version_that_is_not_known_is_a_warning(make_task):
    task = load_task(make_task('version = "2.0"\n[environment]\ndocker_image = "x"'), strict=True)
    assert any("2.0" in w for w in task.warnings)


def test_contradicting_sizes_are_refused(make_task):
    with pytest.raises(TaskError, match="contradict"):
        load_task(make_task("[environment]\ndocker_image='x'\nmemory='2G'\nmemory_mb=1024"), strict=False)
    assert load_task(make_task("[environment]\ndocker_image='x'\nmemory='2G'\nmemory_mb=2048"), strict=False)


def test_fractions_of_a_cpu_are_rounded_up_and_said(make_task):
    task = load_task(make_task("[environment]\ndocker_image = 'x'\ncpus = 1.5"), strict=True)
    assert task.machine.cpus == 2 and any("rounded up" in w for w in task.warnings)


@pytest.mark.parametrize(
    ("toml", "word"),
    [
        (
            "[[steps]]\nname = 'a'\n[environment]\ndocker_image = 'x'\n[dayfly]\nverifier_class = 'rebooted'",
            "multi-step tasks as rebooted",
        ),
        ("[environment]\ndocker_image = 'x'\nos = 'Windows'", "Windows"),
        ("[environment]\ndocker_image = 'x'\ngpus = 1", "GPUs"),
        ("[environment]\ndocker_image = 'x'\n[environment.tpu]\ntype = 'v4'\ntopology = '2x4'", "TPUs"),
        ("artifacts = [{source = '/a', service = 'db'}]\n[environment]\ndocker_image = 'x'", "services"),
    ],
)
def test_what_this_version_cannot_do_is_refused_by_name(make_task, toml, word):
    with pytest.raises(TaskError, match=word) as caught:
        load_task(make_task(toml), strict=False)
    assert caught.value.cause == "unsupported" and caught.value.hint


def test_compose_is_refused_by_name(make_task):
    with pytest.raises(TaskError, match=r"docker-compose\.yaml"):
        load_task(make_task(files={"environment/docker-compose.yaml": ""}), strict=False)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec"),
        ("[agent]\ntimeout_sec = 'soon'", "agent.timeout_sec"),
        ("[environment]\ncpus = 65", "environment.cpus"),
        ("[environment]\nmemory_mb = 64", "environment.memory_mb"),
        ("[environment]\nmemory = 'lots'", "environment.memory"),
        ("[environment]\nworkdir = 'app'", "workdir"),
        ("[environment]\nallowed_hosts = ['a.example']", "allowed_hosts"),
        ("[task]\nname = 'no-org'", "task.name"),
        ("[task]\nname = 'a/b..c'", "task"),
        ("[dayfly]\nverifier_class = 'strict'", "dayfly.verifier_class"),
        ("[dayfly]\npass_reward = 2\nreward_range = [0, 1]", "pass_reward"),
        ("[dayfly]\npass_reward = nan", "pass_reward"),
        ("[dayfly]\nverify = []", "dayfly.verify"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "environment_mode"),
        ("x = ", "TOML"),
    ],
)
def test_a_value_that_cannot_work_names_its_key(make_task, toml, words):
    if "[environment]" in toml:
        toml = toml.replace("[environment]", "[environment]\ndocker_image = 'x'")
    else:
        toml += "\n[environment]\ndocker_image = 'x'"
    with pytest.raises(TaskError) as caught:
        load_task(make_task(toml), strict=False)
    assert words in caught.value.message and "task.toml" in caught.value.message


@pytest.mark.parametrize("source", ["/app/../etc", "/tests/x", "/logs/verifier/reward.txt", ""])
def test_an_artifact_cannot_come_from_the_verifiers_places(make_task, source):
    with pytest.raises(TaskError, match="artifacts"):
        load_task(make_task(f"artifacts = ['{source}']\n[environment]\ndocker_image = 'x'"), strict=False)


@pytest.mark.parametrize("destination", ["/abs", "../up", "manifest.json", "a\\\\b"])
def test_an_artifact_stays_in_its_folder(make_task, destination):
    entry = f'artifacts = [{{source = "/a", destination = "{destination}"}}]'
    with pytest.raises(TaskError, match="destination"):
        load_task(make_task(entry + "\n[environment]\ndocker_image = 'x'"), strict=False)


ENV = "\n[environment]\ndocker_image = 'x'\n"


@pytest.mark.parametrize(
    ("toml", "chosen", "declared"),
    [
        (ENV, "shared", False),
        (ENV + "[verifier]\nenvironment_mode = 'separate'", "separate", True),
        (ENV + "[verifier]\nenvironment_mode = 'shared'", "shared", True),
        (ENV + "[verifier.environment]\ncpus = 1", "separate", True),
        ("artifacts = ['/a']" + ENV, "shared", False),
        ("artifacts = ['/a']" + ENV + "[dayfly]", "separate", False),
        (ENV + "[dayfly]", "rebooted", False),
        (ENV + "[dayfly]\nverifier_class = 'shared'", "shared", True),
        (ENV + "[dayfly]\nverifier_class = 'rebooted'\n[verifier]\nenvironment_mode = 'shared'", "rebooted", True),
        (ENV + "[dayfly]\n[verifier]\nenvironment_mode = 'shared'", "shared", True),
    ],
)
def test_the_verifier_class_follows_the_documented_rule(make_task, toml, chosen, declared):
    task = load_task(make_task(toml), strict=True)
    assert (task.verifier_class.value, task.verifier_declared) == (chosen, declared)


def test_a_verifier_image_owns_its_tests(make_task):
    judge = "[verifier]\nenv = {A = '2'}\n[verifier.environment]\ndocker_image = 'judge'\nmemory_mb = 2048"
    env = "\nenv = {A = '1', B = '1'}"
    task = load_task(make_task(ENV + judge + env, {"tests/test.sh": None}), strict=True)
    assert task.verifier_image == "judge" and task.tests is None
    assert task.verifier_machine == Machine(memory_mib=2048) and task.verifier_env == {"A": "2", "B": "1"}
    with pytest.raises(TaskError, match="machine of its own"):
        load_task(make_task(ENV + judge + "\n[dayfly]\nverifier_class = 'rebooted'"), strict=False)


def test_a_verifier_image_that_must_be_built_owns_its_tests_too(make_task):
    separate = ENV + "[verifier]\nenvironment_mode = 'separate'"
    files = {"tests/Dockerfile": "FROM x", "tests/test.sh": None}
    task = load_task(make_task(separate, files), strict=True)
    assert task.verifier_dockerfile == task.path / "tests/Dockerfile" and task.tests is None
    assert task.verifier_has_own_image and task.dockerfiles == (task.verifier_dockerfile,)
    shared = load_task(make_task(ENV, {"tests/Dockerfile": "FROM x"}, name="shared"), strict=True)
    assert shared.verifier_dockerfile is None and shared.tests is not None  # not used when shared


def test_networks_are_never_ignored_silently(make_task):
    quiet = load_task(make_task(ENV), strict=True)
    assert quiet.warnings == ()
    for wish in ("allow_internet = true", "network_mode = 'public'"):
        assert any("no" in w and "network" in w for w in load_task(make_task(ENV + wish), strict=True).warnings)
    listed = make_task(ENV + "network_mode = 'allowlist'\nallowed_hosts = ['a.example']")
    for strict in (True, False):
        with pytest.raises(TaskError, match="allowlist") as caught:
            load_task(listed, strict=strict)
        assert caught.value.cause == "unsupported"


def test_the_image(make_task):
    built = load_task(make_task("schema_version='1.4'", {"environment/Dockerfile": "FROM x"}), strict=False)
    assert built.image is None and built.dockerfile == built.path / "environment/Dockerfile"
    assert built.dockerfiles == (built.dockerfile,) and built.images == ()
    both = load_task(make_task(ENV, {"environment/Dockerfile": "FROM x", "environment/f": ""}), strict=False)
    assert both.image == "x" and both.environment_files is None  # Harbor's rule: then nothing is uploaded
    with pytest.raises(TaskError, match="docker_image"):
        load_task(make_task("schema_version='1.4'", name="neither"), strict=False)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("tests/test.sh", r"tests/test\.sh"), ("instruction.md", r"instruction\.md"), ("task.toml", r"task\.toml")],
)
def test_a_missing_part_is_named(make_task, missing, words):
    with pytest.raises(TaskError, match=words):
        load_task(make_task(files={missing: None}), strict=False)


def test_a_command_needs_no_script_and_a_solution_is_optional(make_task):
    toml = ENV + "[dayfly]\nverify = ['/usr/bin/python3', '-I', '/tests/check.py']"
    task = load_task(make_task(toml, {"tests/test.sh": None, "solution/solve.sh": None}), strict=True)
    assert task.verifier_command == ("/usr/bin/python3", "-I", "/tests/check.py")
    assert task.tests is None and task.solution is None


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("<!-- harbor-canary GUID 1 -->\n\nDo it.\n", "Do it.\n"),
        ("# CANARY 1\n# more canary\n\n\n# Title\n", "# Title\n"),
        ("# Title\n# canary\n", "# Title\n# canary\n"),
    ],
)
def test_canary_lines_are_not_shown_to_agents(make_task, text, seen):
    assert load_task(make_task(files={"instruction.md": text}), strict=True).instruction == seen


def test_the_json_schema_knows_our_table_and_allows_nothing_else():
    schema = task_json_schema()
    assert schema["additionalProperties"] is False
    assert "verifier_class" in schema["$defs"]["DayflyTable"]["properties"]


def test_force_build_takes_the_dockerfile_where_there_is_one(make_task):
    folder = make_task("[environment]\ndocker_image = 'x'\n[verifier.environment]\ndocker_image = 'judge'")
    assert load_task(folder, strict=True, force_build=True).image == "x"  # nothing to build
    (folder / "environment").mkdir(exist_ok=True)
    (folder / "environment" / "Dockerfile").write_text("FROM x\n")
    assert load_task(folder, strict=True).image == "x"
    task = load_task(folder, strict=True, force_build=True)
    assert (task.image, task.dockerfile) == (None, folder / "environment" / "Dockerfile")
    assert task.verifier_image == "judge"
