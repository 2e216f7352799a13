"""`--force-build`: the Dockerfile is built although an image is named, in the plan and in each rollout."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from dayfly.cli import app


def test_force_build_reaches_the_rollouts_of_a_job(tmp_path):
    folder = tmp_path / "one"
    for name, text in {
        "task.toml": "[environment]\ndocker_image = 'not/pulled'\n",
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM x\n",
        "tests/test.sh": "#!fake\nwrite /logs/verifier/reward.txt 1\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    options = ["-a", "no-op", "--hypervisor", "fake", "--jobs-dir", str(tmp_path / "jobs"), "--json"]
    done = CliRunner().invoke(app, ["run", str(folder), *options, "--force-build"])
    assert done.exit_code == 0, done.output
    lock = json.loads(next((tmp_path / "jobs").glob("*/lock.json")).read_text())
    assert lock["images"] == {}
    record = json.loads(next((tmp_path / "jobs").rglob("rollout.json")).read_text())
    assert record["outcome"] == "passed" and record["image_digest"]
