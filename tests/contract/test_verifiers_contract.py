"""Every verifier under `check_verifier`, on fake and on real VMs; and verifiers that break a rule."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from dayfly.model import Verdict
from dayfly.testing import check_verifier
from dayfly.verifiers import CommandVerifier, ScriptVerifier

REWARD = "/logs/verifier/reward.txt"
COMMAND = '[dayfly]\nverify = ["/tests/test.sh"]\n'


async def right(vm):
    await vm.put(b"done\n", "/contract/result")


async def wrong(vm):
    await vm.put(b"nothing\n", "/contract/result")


def judge(bench) -> list[str]:
    """Statements that end the script unless the work is right, and then write the reward."""
    p = bench.programs
    look = (
        "expect /contract/result done"
        if p.first_line == "#!fake"
        else '[ "$(cat /contract/result)" = done ] || exit 1'
    )
    return [p.write.format(REWARD, "0"), look, p.write.format(REWARD, "1")]


@pytest.mark.parametrize(("verifier", "toml"), [(ScriptVerifier, ""), (CommandVerifier, COMMAND)])
def test_verifier(verifier, toml, bench, make_task):
    p = bench.programs
    task = make_task(p, [], judge(bench), toml)
    slow = [p.write.format(REWARD, "1"), p.sleep.format(600)]
    endless = make_task(p, [], slow, f"[verifier]\ntimeout_sec = 2.0\n{toml}", "endless")
    anyio.run(partial(check_verifier, right=right, wrong=wrong, endless=endless), verifier, bench, task)


class Broken:
    def __init__(self, verify):
        self._verify = verify

    async def verify(self, vm, task, record):
        return await self._verify(vm, record)


async def passes_everything(vm, record):
    return Verdict(reward=1, passed=True)


async def scores_a_lost_vm(vm, record):
    try:
        await vm.get("/contract/result", record.folder / "verifier")
    except Exception:
        return Verdict(reward=0, passed=False)
    passed = (record.folder / "verifier").read_bytes() == b"done\n"
    (record.folder / "verifier").unlink()
    return Verdict(reward=int(passed), passed=passed)


async def writes_elsewhere(vm, record):
    record.write("agent/stdout.txt", b"")
    return Verdict(reward=1, passed=True)


@pytest.mark.parametrize(
    ("verify", "words"),
    [
        (passes_everything, "wrong work passes"),
        (scores_a_lost_vm, "lost there is a verdict"),
        (writes_elsewhere, "outside of verifier/"),
    ],
)
def test_a_broken_verifier_fails_the_suite(verify, words, fake_bench, make_task):
    task = make_task(fake_bench.programs, [], judge(fake_bench))
    check = partial(check_verifier, right=right, wrong=wrong)
    with pytest.raises(AssertionError, match=words):
        anyio.run(check, lambda: Broken(verify), fake_bench, task)
