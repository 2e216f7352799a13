"""Data sets, `dayfly import` and `dayfly export`, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path


def terminal_bench(folder: Path, parser: str = "pytest") -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text(f"instruction: Work.\nparser_name: {parser}\n")
    (folder / "Dockerfile").write_text("FROM debian:13\n")
    (folder / "run-tests.sh").write_text("true\n")


def test_import_terminal_bench(dayfly, tmp_path):
    terminal_bench(tmp_path / "old/good")
    terminal_bench(tmp_path / "old/odd", parser="mlebench")
    done = dayfly("import", "terminal-bench", "old", "--to", "tasks")
    assert done.code == 1, "one was not carried over"
    assert "good  tasks/good" in done.out and "public network" in done.out
    assert "'mlebench' is not carried over" in done.err
    assert (tmp_path / "tasks/good/task.toml").exists() and not (tmp_path / "tasks/odd").exists()
    done = dayfly("import", "terminal-bench", "old/good", "--to", "tasks")
    assert done.code == 2 and "--force" in done.err
    done = dayfly("import", "terminal-bench", "old/good", "--to", "tasks", "--force", "--json")
    assert done.code == 0 and [i["task"] for i in done.json["imported"]] == ["good"]
    assert done.json["refused"] == []


def test_import_swebench_with_predictions(dayfly, tmp_path):
    row = {
        "instance_id": "acme__a-1",
        "repo": "acme/a",
        "base_commit": "0" * 40,
        "problem_statement": "Broken.",
        "test_patch": "diff --git a/test_a.py b/test_a.py\nnew file mode 100644\n",
        "FAIL_TO_PASS": ["test_a.py::test"],
        "PASS_TO_PASS": [],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "instance_id": "acme__b-2"}))
    prediction = {"instance_id": "acme__a-1", "model_name_or_path": "m", "model_patch": "diff"}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(prediction))
    words = ("import", "swebench", "rows.jsonl", "--to", "tasks", "--image-template", "x/{instance_id}:1")
    done = dayfly(*words, "--instance", "acme__a-1", "--predictions", "predictions.jsonl")
    assert done.code == 0, done.err
    assert done.out.startswith("acme__a-1  tasks/acme__a-1\n") and "dayfly run tasks/job.yaml" in done.err
    assert not (tmp_path / "tasks/acme__b-2").exists()
    assert 'docker_image = "x/acme__a-1:1"' in (tmp_path / "tasks/acme__a-1/task.toml").read_text()
    done = dayfly("run", "tasks/job.yaml", "--hypervisor", "fake", "--dry-run")
    assert done.code == 0, done.err
    done = dayfly(*words, "--force", "--parser", "odd", "--test-command", "make test")
    assert done.code == 2 and "pytest, unittest, sympy" in done.err


def test_export_harbor(dayfly, make_task, run_job, tmp_path, monkeypatch):
    make_task()
    job = run_job("--agent", "oracle")
    done = dayfly("export", "harbor", "last", "--to", "out", "--json")
    assert done.code == 0 and done.json == {"schema_version": 1, "path": f"out/{job}", "trials": 1}
    (trial,) = (tmp_path / "out" / job).glob("*/result.json")
    assert json.loads(trial.read_bytes())["verifier_result"] == {"rewards": {"reward": 1.0}}
    done = dayfly("export", "harbor", job, "--to", "out")
    assert done.code == 2 and "--force" in done.err
    monkeypatch.setenv("A_TOKEN", "judging\n"[:-1] + "\n")
    done = dayfly("export", "harbor", job, "--to", "other")
    assert done.code == 2 and "would hold the value of A_TOKEN" in done.err
    assert list((tmp_path / "other").iterdir()) == []


def test_data_sets_wherever_a_task_can_be_named(dayfly, make_task, tmp_path):
    make_task("one")
    make_task("two")
    entries = [
        {"name": "a", "version": "1", "tasks": [{"name": "one", "path": "tasks/one"}]},
        {"name": "b", "version": "1", "tasks": [{"name": "two", "path": "tasks/two"}]},
    ]
    (tmp_path / "registry.json").write_text(json.dumps(entries))
    (tmp_path / "job.yaml").write_text("tasks: ['registry.json#b', tasks/one]\nagents: [no-op]\n")
    how = ("--hypervisor", "fake", "--dry-run", "--json")

    def planned(*words: str) -> list[str]:
        done = dayfly("run", *words, *how)
        assert done.code == 0, done.err
        return list(done.json["budgets"])

    assert planned("--dataset", "a@1", "--registry-path", "registry.json") == ["one"]
    assert planned("-d", "b", "-d", "a", "--registry-path", "registry.json") == ["two", "one"]
    assert planned("registry.json#b@1") == ["two"]
    assert planned("job.yaml") == ["two", "one"]
    done = dayfly("run", "--dataset", "a")
    assert done.code == 2 and "--registry-path" in done.err
    done = dayfly("run", "registry.json")
    assert done.code == 2 and "2 data sets" in done.err
    done = dayfly("check", "--static", "registry.json#a", "--json")
    assert [t["task"] for t in done.json["tasks"]] == ["one"]
