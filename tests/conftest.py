"""What all tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dayfly.images import ImageStore
from dayfly.model import Disk

IMAGE = "dayfly/demo-base:latest"

settings.register_profile(
    "dayfly", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("dayfly")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _mark_vm_tests_in_the_report(request: pytest.FixtureRequest, record_property) -> None:
    """scripts/count-vm-tests counts these."""
    if request.node.get_closest_marker("vm"):
        record_property("vm", "yes")


@pytest.fixture(scope="session")
def base_disk() -> Iterator[Disk]:
    """The disk of the demo's base image; imported from the tar that scripts/run-tests has built, if need be."""
    store = ImageStore()
    tar = os.environ.get("DAYFLY_TEST_BASE_TAR")
    if not any(i.name == IMAGE for i in store.list()):
        if not tar:
            pytest.skip("the base image is not built; scripts/run-tests builds it")
        store.import_image(Path(tar), IMAGE, workdir="/app")
    with store.using(store.disk(store.resolve(IMAGE))) as disk:
        yield disk


@dataclass(frozen=True)
class Done:
    """What a command ended with and wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Exactly one JSON document, without a NaN."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture
def dayfly(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the program's entry point in this process."""
    from dayfly.cli import main

    def call(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["dayfly", *map(str, words)])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capfd.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        return Done(code, *capfd.readouterr())

    return call


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `dayfly run …` in `tmp_path` as a process; whatever happens, none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dayfly.cli", "run", *args, "--jobs-dir", str(tmp_path / "jobs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
