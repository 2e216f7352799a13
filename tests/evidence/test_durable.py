from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dayfly.errors import DayflyError, HostError, NotFoundError
from dayfly.evidence import append_event, publish, read_events, read_json, remove_tree, write_durable
from dayfly.evidence.durable import end_torn_line


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_write_durable_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_durable(path, b"one")
    write_durable(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]
    assert mode(path) == 0o600


def test_write_durable_replaces_a_link_not_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    (tmp_path / "link").symlink_to(target)
    write_durable(tmp_path / "link", b"new")
    assert target.read_text() == "untouched"
    assert not (tmp_path / "link").is_symlink()


def test_a_failed_write_says_where_and_leaves_the_old_bytes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostError, match="folder"):
        write_durable(tmp_path / "folder", b"x")
    with pytest.raises(HostError, match="absent"):
        write_durable(tmp_path / "absent" / "f", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_full_disk_says_what_to_do() -> None:
    with pytest.raises(HostError) as caught:
        append_event(Path("/dev/full"), {"a": 1})
    assert "free disk space" in str(caught.value)


def test_publish_makes_private_and_never_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    (folder / "deep").mkdir(parents=True, mode=0o777)
    (folder / "deep" / "f").write_text("x")
    (folder / "deep" / "f").chmod(0o666)
    (folder / "deep" / "link").symlink_to("/etc/passwd")
    (folder / "locked").mkdir(mode=0o000)
    publish(folder, tmp_path / "a" / "final")
    final = tmp_path / "a" / "final"
    assert [mode(p) for p in (final, final / "deep", final / "locked", final / "deep" / "f")] == [
        0o700,
        0o700,
        0o700,
        0o600,
    ]
    folder.mkdir()
    (folder / "other").write_text("y")
    with pytest.raises(HostError) as caught:
        publish(folder, final)
    assert caught.value.cause == "exists"
    assert (final / "deep" / "f").read_text() == "x"
    assert (folder / "other").exists()


def test_remove_tree_removes_what_has_no_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").write_text("x")
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    remove_tree(folder)
    remove_tree(folder)
    assert not folder.exists()


def test_events_survive_torn_lines(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert list(read_events(log)) == []
    append_event(log, {"n": 1, "text": "two\nlines \udcff"})
    with log.open("ab") as file:
        file.write(b'{"n": 2, "te')  # killed here
    assert [e["n"] for e in read_events(log)] == [1]
    end_torn_line(log)
    end_torn_line(log)
    append_event(log, {"n": 3}, durable=True)
    assert [e["n"] for e in read_events(log)] == [1, 3]
    assert mode(log) == 0o600


def test_events_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for n in range(100):
                    append_event(log, {"writer": writer, "n": n, "pad": "x" * 3000})
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert len(log.read_bytes().splitlines()) == 400
    seen = [(e["writer"], e["n"]) for e in read_events(log)]
    assert sorted(seen) == [(w, n) for w in range(4) for n in range(100)]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_broken_json_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(data)
    with pytest.raises(HostError) as caught:
        read_json(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_an_absent_json_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_json(tmp_path / "x")
    assert issubclass(NotFoundError, DayflyError)
