"""`image pull` and `image inspect` on a real registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dayfly.cli import app
from dayfly.images.tar import Entry, Kind, write_tar

Dayfly = Callable[..., Result]


def layer(name: str) -> bytes:
    return write_tar((Entry(b"", Kind.DIR), b""), (Entry(name.encode(), Kind.FILE, size=1), b"x"))


@pytest.fixture
def dayfly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dayfly:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *words: CliRunner().invoke(app, ["image", *map(str, words)])


def task(folder: Path, image: str) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(f'[environment]\ndocker_image = "{image}"\n')
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests/test.sh").write_text("#!/bin/sh\n")


def test_a_task_set_is_prepared_in_spite_of_a_failure(
    registry: Any, use: Any, dayfly: Dayfly, tmp_path: Path
) -> None:
    use(registry.host)
    digests = {}
    for name in ("one", "two"):
        image = f"{registry.host}/cli/{name}:1"
        digests[image] = registry.push(f"cli/{name}:1", [layer("base"), layer(name)])
        task(tmp_path / "tasks" / name, image)
    task(tmp_path / "tasks/again", f"{registry.host}/cli/one:1")
    task(tmp_path / "tasks/absent", f"{registry.host}/cli/absent:1")

    done = dayfly("pull", tmp_path / "tasks")
    assert done.exit_code == 4
    lines = dict(line.split() for line in done.stdout.splitlines())
    assert lines == {**digests, f"{registry.host}/cli/absent:1": "failed"}
    progress = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in progress] == ["[1/3", "[2/3", "[3/3"]
    assert sum("disk" in line for line in progress) == 2
    assert "\n  hint: " in done.stderr and "\\n" not in done.stderr

    done = dayfly("pull", tmp_path / "tasks/one", tmp_path / "tasks/two", "--json")
    assert done.exit_code == 0
    assert [row["downloaded_bytes"] for row in json.loads(done.stdout)["images"]] == [0, 0]


def test_a_name_is_asked_for_anew(registry: Any, use: Any, dayfly: Dayfly) -> None:
    use(registry.host)
    name = f"{registry.host}/cli/moves:1"
    registry.push("cli/moves:1", [layer("old")])
    assert dayfly("pull", name).exit_code == 0
    new = registry.push("cli/moves:1", [layer("new")])
    assert new not in dayfly("pull", name, "--pull", "missing").stdout
    assert new in dayfly("pull", name).stdout


def test_inspect_says_what_shares_a_layer(registry: Any, use: Any, dayfly: Dayfly) -> None:
    use(registry.host)
    names = [f"{registry.host}/cli/{n}:1" for n in ("inspected", "sharing")]
    for name in ("inspected", "sharing"):
        registry.push(f"cli/{name}:1", [layer("common"), layer(name)])
    assert dayfly("pull", *names).exit_code == 0
    found = json.loads(dayfly("inspect", names[0], "--json").stdout)
    assert found["names"] == [names[0]] and found["config"]["workdir"] == "/srv"
    assert [x["shared_with"] for x in found["layers"]] == [[names[1]], []]
    assert found["disk_bytes"] > 0 and found["disk_digest"]
    text = dayfly("inspect", names[0]).stdout
    for word in (names[1], "/srv", "amd64", found["digest"]):
        assert word in text


def test_what_is_not_here_cannot_be_inspected(dayfly: Dayfly) -> None:
    assert dayfly("inspect", "no/such").exit_code != 0


def test_a_folder_that_is_not_there_is_no_image(dayfly: Dayfly, tmp_path: Path) -> None:
    done = dayfly("pull", tmp_path / "nowhere")
    assert done.exit_code == 2 or "does not exist" in str(done.exception)
