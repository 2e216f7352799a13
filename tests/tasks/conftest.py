"""Task folders made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
schema_version = "1.4"
[environment]
docker_image = "dayfly/none"
"""


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """Write a task folder; `toml` replaces task.toml, `files` adds or (None) removes files."""

    def make(toml: str = MINIMAL, files: dict[str, str | None] | None = None, name: str = "one") -> Path:
        folder = tmp_path / name
        wanted: dict[str, str | None] = {
            "task.toml": toml,
            "instruction.md": "Do it.\n",
            "solution/solve.sh": "#!/bin/sh\n",
            "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
            **(files or {}),
        }
        for path, text in wanted.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make
