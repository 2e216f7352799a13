from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dayfly.errors import HostError, NotFoundError
from dayfly.evidence import canonical_json, load_record, seal, sha256_bytes, verify_folder
from dayfly.model import Cause, Outcome, RolloutRecord, Verdict

MakeRecord = Callable[..., RolloutRecord]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    (folder / "agent").mkdir(parents=True)
    (folder / "agent" / "stdout.txt").write_bytes(b"hello\xff")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("agent/..//stdout.txt")
    Path(os.fsdecode(os.fsencode(folder) + b"/odd\xff\n%41")).write_bytes(b"odd")
    with (folder / "disk.img").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 20)
        file.write(b"data")
    return folder


def problems(folder: Path) -> set[tuple[str, str]]:
    return {(p.kind, p.path) for p in verify_folder(folder)}


def test_a_sealed_folder_is_intact_and_loads_as_it_was(folder: Path, make_record: MakeRecord) -> None:
    verdict = Verdict(reward=1, passed=True, details={"nan": float("nan"), "t": (1, 2)})
    cause = Cause(kind="k", message="path \udcff")
    sealed = seal(make_record(verdict=verdict, cause=cause), folder)
    assert verify_folder(folder) == []
    assert load_record(folder) == sealed
    assert sealed.files["agent/stdout.txt"] == sha256_bytes(b"hello\xff")
    assert sealed.files["link"] == "link:agent/..//stdout.txt"
    assert sealed.files["odd%FF%0A%2541"] == sha256_bytes(b"odd")
    assert sealed.files["disk.img"].startswith("sparse-sha256:")
    assert set(sealed.files) == {"agent/stdout.txt", "link", "odd%FF%0A%2541", "disk.img"}
    data = json.loads((folder / "rollout.json").read_bytes())
    wanted = "schema_version task agent attempt outcome reward isolation verifier_class start_fingerprint"
    assert set(wanted.split()) <= set(data)


def test_a_copy_without_holes_is_still_intact(folder: Path, make_record: MakeRecord) -> None:
    with (folder / "disk.img").open("r+b") as file:
        file.truncate(17 << 20)
    seal(make_record(), folder)
    data = (folder / "disk.img").read_bytes()
    (folder / "disk.img").unlink()
    (folder / "disk.img").write_bytes(data)
    assert verify_folder(folder) == []


def test_every_change_is_found(folder: Path, make_record: MakeRecord) -> None:
    seal(make_record(), folder)
    (folder / "agent" / "stdout.txt").write_bytes(b"hello\xfe")
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")
    Path(os.fsdecode(os.fsencode(folder) + b"/odd\xff\n%41")).unlink()
    (folder / "empty" / "new").write_text("x")
    with (folder / "disk.img").open("r+b") as file:
        file.seek(1 << 29)
        file.write(b"\1")
    assert problems(folder) == {
        ("changed", "agent/stdout.txt"),
        ("changed", "link"),
        ("missing", "odd%FF%0A%2541"),
        ("extra", "empty/new"),
        ("changed", "disk.img"),
    }


def test_a_file_swapped_for_a_link_to_the_same_bytes_is_found(folder: Path, make_record: MakeRecord) -> None:
    seal(make_record(), folder)
    original = folder / "agent" / "stdout.txt"
    copy = folder.parent / "copy"
    original.rename(copy)
    original.symlink_to(copy)
    assert problems(folder) == {("changed", "agent/stdout.txt")}


def test_a_changed_record_breaks_the_seal(folder: Path, make_record: MakeRecord) -> None:
    seal(make_record(Outcome.FAILED), folder)
    path = folder / "rollout.json"
    path.write_bytes(path.read_bytes().replace(b'"failed"', b'"passed"', 1))
    assert problems(folder) == {("seal", "rollout.json")}


def test_a_broken_record_is_named(folder: Path, make_record: MakeRecord) -> None:
    with pytest.raises(NotFoundError):
        load_record(folder)
    assert problems(folder) == {("record", "rollout.json")}
    sealed = seal(make_record(), folder)
    path = folder / "rollout.json"
    for change, expected in (
        ({"outcome": "great"}, "outcome"),
        ({"surprise": 1}, "surprise"),
        ({"schema_version": 2}, "newer dayfly"),
    ):
        path.write_text(json.dumps(sealed.model_dump(mode="json") | change))
        with pytest.raises(HostError) as caught:
            load_record(folder)
        assert str(path) in str(caught.value)
        assert expected in str(caught.value)
    path.write_bytes(b"")
    assert problems(folder) == {("record", "rollout.json")}


def test_odd_kinds_are_recorded_and_never_opened(folder: Path, make_record: MakeRecord) -> None:
    os.mkfifo(folder / "fifo")  # opening it would block for ever
    sealed = seal(make_record(), folder)
    assert sealed.files["fifo"] == "other:p"
    assert verify_folder(folder) == []


def test_a_record_of_an_older_dayfly_with_fewer_fields_is_as_it_was_sealed(job, make_record, publish_one):
    place = job.rollout_path(publish_one(make_record()).key)
    path = place / "rollout.json"
    older = json.loads(path.read_text())
    del older["steps"]
    older["phases"] = [{"name": "boot", "started_unix": 1.0, "seconds": 1.0}]
    older["seal"] = sha256_bytes(canonical_json(older | {"seal": ""}))
    path.write_text(json.dumps(older))
    assert verify_folder(place) == []
    path.write_text(json.dumps(older | {"steps": []}))
    assert [p.kind for p in verify_folder(place)] == ["seal"]  # also a change that says nothing
