"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

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
