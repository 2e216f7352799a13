"""Public fakes and contract suites, for tests of dayfly and of what plugs into it."""

from dayfly.testing.agents import check_agent
from dayfly.testing.engines import check_engine
from dayfly.testing.fake import FakeHypervisor, FakeVm
from dayfly.testing.samples import sample_record, sample_spec
from dayfly.testing.stores import check_store
from dayfly.testing.verifiers import check_verifier
from dayfly.testing.vms import FAKE, HYPERVISOR_CHECKS, SHELL, Bench, Programs, check_hypervisor, run_check

__all__ = [
    "FAKE",
    "HYPERVISOR_CHECKS",
    "SHELL",
    "Bench",
    "FakeHypervisor",
    "FakeVm",
    "Programs",
    "check_agent",
    "check_engine",
    "check_hypervisor",
    "check_store",
    "check_verifier",
    "run_check",
    "sample_record",
    "sample_spec",
]
