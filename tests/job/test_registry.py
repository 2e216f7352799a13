"""From a name in a job file to an agent or hypervisor: short names, dotted paths, entry points, and mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dayfly.agents import OracleAgent
from dayfly.errors import ConfigError
from dayfly.evidence import JobFolder
from dayfly.job import load_job_file, plan_new
from dayfly.model import AgentSpec, Outcome
from dayfly.registry import HypervisorSettings, make_agent, make_hypervisor
from dayfly.testing import FakeHypervisor

PLUG_IN = """\
from dayfly.errors import ConfigError
from dayfly.protocols import AgentResult


class Writer:
    def __init__(self, text):
        self.text = text

    @classmethod
    def from_options(cls, options, base_dir):
        if set(options) != {"text"}:
            raise ConfigError("the writer takes the option text")
        return cls(options["text"])

    async def run(self, vm, task, record, timeout_s):
        await vm.put(self.text.encode() + b"\\n", "/app/result.txt")
        return AgentResult()


def no_agent():
    pass
"""

JOB = """\
tasks: [tasks]
hypervisor: fake
agents:
  - name: mine
    kind: {kind}
    options: {{text: done}}
"""


def spec(kind: str, **options: object) -> AgentSpec:
    return AgentSpec(name="a", kind=kind, options=options)


@pytest.fixture
def plugged_in(tmp_path: Path, monkeypatch) -> Path:
    """A module and an entry point, on the path as an installed distribution is."""
    site = tmp_path / "site"
    (site / "plug_in_agents-1.0.dist-info").mkdir(parents=True)
    (site / "plug_in_agents.py").write_text(PLUG_IN)
    (site / "plug_in_agents-1.0.dist-info/METADATA").write_text("Name: plug-in-agents\nVersion: 1.0\n")
    (site / "plug_in_agents-1.0.dist-info/entry_points.txt").write_text(
        "[dayfly.agents]\n"
        "writer = plug_in_agents:Writer\n"
        "gone = plug_in_agents:Nobody\n"
        "[dayfly.hypervisors]\n"
        "mine = dayfly.testing:FakeHypervisor\n"
    )
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("plug_in_agents", None)


def test_short_names_and_dotted_paths(tmp_path):
    assert isinstance(make_agent(spec("oracle"), tmp_path), OracleAgent)
    assert isinstance(make_agent(spec("dayfly.agents:OracleAgent"), tmp_path), OracleAgent)
    assert isinstance(make_hypervisor("fake", HypervisorSettings()), FakeHypervisor)


@pytest.mark.parametrize("kind", ["writer", "plug_in_agents:Writer"])
def test_an_agent_from_elsewhere_is_known_by_its_source(plugged_in, make_task, tmp_path, run_fake, kind):
    make_task()
    (tmp_path / "job.yaml").write_text(JOB.format(kind=kind))
    job = load_job_file(tmp_path / "job.yaml")
    plan = plan_new(job, tmp_path, tmp_path / "jobs")
    (record,) = run_fake(plan).records
    assert record.outcome is Outcome.PASSED
    (plugged_in / "plug_in_agents.py").write_text(PLUG_IN + "# another version\n")
    assert plan_new(job, tmp_path, tmp_path / "jobs").agents[0].digest != record.agent_digest


def test_the_jobs_folder_is_not_searched_for_modules_unless_you_say_so(make_task, tmp_path):
    """A file lying beside a job file must not shadow a module of the host; PYTHONPATH is how to say it is meant."""
    make_task()
    (tmp_path / "beside_the_job.py").write_text(PLUG_IN)
    (tmp_path / "job.yaml").write_text(JOB.format(kind="beside_the_job:Writer"))

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        paths = [p for p in (env.pop("extra", ""), *sys.path) if p]
        return subprocess.run(
            [Path(sys.executable), "-P", "-m", "dayfly.cli", "run", "job.yaml", "--jobs-dir", "jobs"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    refused = run()
    assert refused.returncode == 2, refused.stderr
    assert "beside_the_job" in refused.stderr and "PYTHONPATH" in refused.stderr
    done = run(extra=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (job,) = (tmp_path / "jobs").glob("*/job.json")
    (record,) = JobFolder.open(tmp_path / "jobs", job.parent.name).records()
    assert record.outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("oracel", "did you mean 'oracle'"),
        ("something-else", "known: command, function, no-op, oracle"),
        ("no.such.package:Agent", "no.such.package"),
        ("plug_in_agents:Absent", "Absent"),
        ("plug_in_agents:", "package.module:Name"),
        (":Name", "package.module:Name"),
        ("..relative:Name", "package.module:Name"),
        ("agents/mine.py:Agent", "kind: function"),
        ("plug_in_agents:no_agent", "from_options"),
        ("gone", "Nobody"),
    ],
)
def test_a_wrong_agent_kind_is_a_config_error(plugged_in, tmp_path, kind, words):
    with pytest.raises(ConfigError) as caught:
        make_agent(spec(kind), tmp_path)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('at import')\n", "RuntimeError: at import"),
        ("def f(:\n", "SyntaxError"),
        ("import sys; sys.exit(3)\n", "SystemExit"),
        ("import no_such_dependency\n", "no_such_dependency"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(plugged_in, tmp_path, source, words):
    (plugged_in / "plug_in_agents.py").write_text(source)
    for kind in ("plug_in_agents:Writer", "writer"):
        with pytest.raises(ConfigError, match=words):
            make_agent(spec(kind), tmp_path)


def test_a_plug_ins_own_complaint_passes_through(plugged_in, tmp_path):
    with pytest.raises(ConfigError, match="takes the option text"):
        make_agent(spec("writer", colour="red"), tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("qmu", "did you mean 'qemu'"), ("else", "known: fake, qemu"), ("dayfly.testing:Absent", "Absent")],
)
def test_a_wrong_hypervisor_is_a_config_error(name, words):
    with pytest.raises(ConfigError) as caught:
        make_hypervisor(name, HypervisorSettings())
    assert words in str(caught.value)


def test_a_hypervisor_from_elsewhere(plugged_in):
    assert isinstance(make_hypervisor("mine", HypervisorSettings()), FakeHypervisor)
