"""The doctor's findings and the question to KVM, on this host as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dayfly.doctor import checks
from dayfly.errors import ConfigError, HostError
from dayfly.hypervisors.qemu.host import choose_accelerator
from dayfly.hypervisors.qemu.probe import PROBE_TIMEOUT_S, probe_kvm
from dayfly.hypervisors.qemu.settings import QemuSettings


def test_a_host_that_runs_these_tests_has_nothing_that_fails(settings: QemuSettings) -> None:
    found = {c.name: c for c in checks(settings)}
    assert [c for c in found.values() if c.status == "fail"] == []
    assert all(c.fix for c in found.values() if c.status == "warn")
    assert "security boundary" in found["isolation"].detail or found["isolation"].detail.startswith("kvm")


def test_what_is_missing_is_said_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DAYFLY_KERNEL", str(tmp_path / "none"))
    found = {c.name: c for c in checks(QemuSettings(cache_dir=tmp_path, qemu="qemu-system-none"))}
    for name in ("qemu", "kernel"):
        assert found[name].status == "fail"
        assert found[name].fix


@pytest.mark.vm
def test_kvm_is_asked_with_a_guest_and_the_answer_is_kept(settings: QemuSettings) -> None:
    answer = probe_kvm(settings, fresh=True)
    assert answer.seconds < PROBE_TIMEOUT_S + 6
    assert answer.detail
    assert probe_kvm(settings) == answer
    assert choose_accelerator(settings) == ("kvm" if answer.works else "tcg")


def test_kvm_that_is_required_and_does_not_work_is_an_error(settings: QemuSettings) -> None:
    if probe_kvm(settings).works:
        pytest.skip("KVM works here")
    with pytest.raises(HostError, match="does not work"):
        choose_accelerator(replace(settings, accelerator="kvm"))
    with pytest.raises(ConfigError, match="not known"):
        choose_accelerator(replace(settings, accelerator="turbo"))
