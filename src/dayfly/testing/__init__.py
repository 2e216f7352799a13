"""Public fakes and contract suites, for tests of dayfly and of what plugs into it."""

from dayfly.testing.fake import FakeHypervisor, FakeVm

__all__ = ["FakeHypervisor", "FakeVm"]
