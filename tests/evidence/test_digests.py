from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.evidence import canonical_json, fingerprint, readable_json, sha256_bytes, sha256_file, sha256_sparse
from dayfly.model import Machine

# What a path can hold as text: any character, and escaped bytes; no other surrogates.
TEXT = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("\udc80\udcff"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)


@given(VALUES)
def test_canonical_json_loses_nothing(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data
    assert data.isascii()


@given(st.dictionaries(TEXT, VALUES, max_size=6), st.randoms())
def test_canonical_json_does_not_depend_on_order(table: dict[str, Any], random: Any) -> None:
    items = list(table.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(table)


def test_canonical_json_refuses_what_has_two_forms_or_none() -> None:
    for value in (float("nan"), [float("inf")]):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json(value)
    for value in ({1: "a"}, {"a": {None: 1}}, [object()]):
        with pytest.raises(TypeError):
            canonical_json(value)


def test_readable_json_says_the_same() -> None:
    value = {"b": [1, {"c": "\udcff"}], "a": Machine()}
    text = readable_json(value)
    assert canonical_json(json.loads(text)) == canonical_json(value)
    assert text.index(b'"b"') < text.index(b'"a"')
    assert text.endswith(b"\n")


def test_models_and_paths_are_json() -> None:
    assert canonical_json({"m": Machine(cpus=2), "p": Path("/x")}) == (
        b'{"m":{"cpus":2,"memory_mib":1024,"storage_mib":4096},"p":"/x"}'
    )


def test_file_digest_is_that_of_its_bytes_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert sha256_file(tmp_path / "f") == sha256_bytes(b"x" * 3_000_000)
    (tmp_path / "l").symlink_to("f")
    with pytest.raises(OSError, match="symbolic"):
        sha256_file(tmp_path / "l")


def sparse_file(path: Path, size: int, pieces: dict[int, bytes]) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in pieces.items():
            file.seek(offset)
            file.write(data)
    return path


@given(
    st.dictionaries(st.integers(0, 900_000), st.binary(min_size=1, max_size=9000), max_size=4),
    st.integers(0, 1_000_000),
)
def test_sparse_digest_depends_on_content_not_on_holes(pieces: dict[int, bytes], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        holes = sparse_file(Path(folder) / "holes", size, pieces)
        full = Path(folder) / "full"
        full.write_bytes(holes.read_bytes())
        assert sha256_sparse(holes) == sha256_sparse(full)
        if holes.stat().st_size:
            with full.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
            assert sha256_sparse(holes) != sha256_sparse(full)


def test_sparse_digest_sees_length_and_place(tmp_path: Path) -> None:
    one = sha256_sparse(sparse_file(tmp_path / "a", 1 << 20, {4096: b"x"}))
    assert sha256_sparse(sparse_file(tmp_path / "b", 1 << 21, {4096: b"x"})) != one
    assert sha256_sparse(sparse_file(tmp_path / "c", 1 << 20, {8192: b"x"})) != one


def test_a_disk_of_terabytes_is_digested_by_its_data(tmp_path: Path) -> None:
    # Reading every byte would take hours; the test would be seen to hang.
    assert sha256_sparse(sparse_file(tmp_path / "d", 1 << 42, {1 << 41: b"data"})).startswith("sparse-sha256:")


def test_fingerprints_are_equal_for_equal_parts() -> None:
    assert fingerprint({"a": 1, "b": [2]}).digest == fingerprint({"b": [2], "a": 1}).digest
    assert fingerprint({"a": 1}).digest != fingerprint({"a": 2}).digest
