"""Every hypervisor under the contract suite that `dayfly.testing` ships."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import pytest

from dayfly.errors import BootError
from dayfly.testing import FAKE, HYPERVISOR_CHECKS, FakeHypervisor, check_hypervisor, run_check
from dayfly.testing.vms import reports_status_and_output


@pytest.mark.parametrize("check", HYPERVISOR_CHECKS, ids=lambda check: check.__name__)
def test_hypervisor(check, bench):
    anyio.run(run_check, check, bench)


def test_the_whole_suite_is_one_call(fake_bench):
    hypervisor = FakeHypervisor()
    suite = partial(check_hypervisor, programs=FAKE, running=lambda ids: hypervisor.running, lifetime_s=0.5)
    anyio.run(suite, hypervisor, fake_bench.disk, fake_bench.machine, fake_bench.folder)
    assert hypervisor.started > len(HYPERVISOR_CHECKS)


def test_the_fake_uses_an_id_once(fake_bench):
    async def twice() -> None:
        async with fake_bench.vm(vm_id="same"):
            pass
        async with fake_bench.vm(vm_id="same"):
            pass

    with pytest.raises(BootError, match="same"):
        anyio.run(twice)


def test_a_wrong_status_fails_the_suite(fake_bench):
    fake_bench.programs = replace(FAKE, exit="exit 6 # {0}")
    with pytest.raises(AssertionError, match="exit status 7"):
        anyio.run(run_check, reports_status_and_output, fake_bench)


def test_a_vm_that_is_left_fails_the_suite(fake_bench):
    fake_bench.running = lambda ids: 1
    with pytest.raises(AssertionError, match="1 VM"):
        anyio.run(run_check, reports_status_and_output, fake_bench)
