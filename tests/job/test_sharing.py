"""Records in little memory are equal to what they were."""

from __future__ import annotations

import tracemalloc

from dayfly.evidence import canonical_json
from dayfly.evidence.seal import seal_of
from dayfly.model import Cause, Fingerprint, Machine, Outcome, PhaseTime, RolloutRecord, Usage, Verdict, VmInfo
from dayfly.sharing import Sharing
from dayfly.testing import sample_record, sample_spec

ARGV = tuple(f"--argument-{n}=with-a-value" for n in range(60))


def record(attempt: int, text: str = "a note") -> RolloutRecord:
    """As a real one: through JSON, so that nothing is shared."""
    spec = sample_spec(attempt)
    full = sample_record(
        spec,
        outcome=Outcome.FAILED,
        verdict=Verdict(reward=0.5, passed=False, details={"list": ["x", {"y": 1.5}]}),
        cause=Cause(kind="k", message=text),
        start_fingerprint=Fingerprint(digest="sha256:9", parts={"disk": "sha256:7", "machine": {"cpus": 1}}),
        phases=tuple(PhaseTime(name="boot", started_unix=float(n), seconds=attempt / 3) for n in range(9)),
        vms=tuple(VmInfo(id=f"{spec.rollout_id}-{n}", isolation="tcg", how="fork", argv=ARGV) for n in range(2)),
        usage=Usage(memory_peak_bytes=1 << 20),
        machine=Machine(memory_mib=512),
        files={f"verifier/logs/file-{n}": f"sha256:{n:064d}" for n in range(8)},
        notes=(text,),
    )
    return RolloutRecord.model_validate_json(full.model_dump_json())


def test_equal_in_every_way():
    sharing = Sharing()
    for before in (record(1), record(2, "x" * 1000), record(3, "\u2028\ud800".encode("utf-8", "replace").decode())):
        untouched = before.model_dump()
        after = sharing.share(before)
        assert after == before and before.model_dump() == untouched
        assert canonical_json(after) == canonical_json(before)
        assert seal_of(after) == seal_of(before)
        assert type(after.outcome) is Outcome
        assert after.model_copy(update={"retry": 3}).retry == 3


def test_parts_are_shared_only_when_they_are_equal():
    sharing = Sharing()
    one, other = sharing.share(record(1)), sharing.share(record(2))
    assert one.start_fingerprint is other.start_fingerprint
    assert one.machine is other.machine
    forged = record(3).model_copy(update={"start_fingerprint": Fingerprint(digest="sha256:9", parts={})})
    assert sharing.share(forged).start_fingerprint == Fingerprint(digest="sha256:9", parts={})


def test_a_thousand_records_are_small():
    def kept(make) -> int:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            records = [make(n) for n in range(1, 201)]
            return (tracemalloc.get_traced_memory()[0] - before) // len(records)
        finally:
            tracemalloc.stop()

    sharing = Sharing()
    record(1)
    plain, shared = kept(record), kept(lambda n: sharing.share(record(n)))
    assert shared < plain / 2
    assert shared < 10_000
