"""gate.yaml and the quarantine file: what is refused, and what a policy's digest covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayfly.errors import ConfigError
from dayfly.gate.load import load_policy
from dayfly.gate.policy import Policy

ROOT = Path(__file__).parents[2]
SCORE = "metrics:\n  score: {margin: 0.05}\n"


def write(folder: Path, text: str, quarantine: str | None = None) -> Path:
    path = folder / "gate.yaml"
    path.write_text(text)
    if quarantine is not None:
        (folder / "quarantine.yaml").write_text(quarantine)
    return path


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        (SCORE + "coverag: {}\n", "coverag:", "'coverage'"),
        (SCORE + "coverage: {sides: 0.9}\n", "coverage.sides", "'side'"),
        ("metrics:\n  scor: {margin: 0.05}\n", "metrics.scor", "'score'"),
        ("metrics:\n  pass@0: {margin: 0.05}\n", "metrics.pass@0", "'pass@1'"),
        ("metrics:\n  score: {margn: 0.05}\n", "metrics.score.margn", "'margin'"),
        ("metrics:\n  score: {}\n", "metrics.score", None),
        ("metrics:\n  score: {margin: -0.1}\n", "metrics.score.margin", None),
        ("metrics:\n  score: {margin: 5}\n", "metrics.score.margin: 5 is no share", None),
        ("metrics:\n  score: {margin: .nan}\n", "metrics.score.margin", None),
        ("metrics:\n  reward: {min: .inf}\n", "metrics.reward.min", None),
        ("metrics:\n  seconds: {min: 5, max: 4}\n", "min 5 is above max 4", None),
        ("metrics:\n  score: {margin: 0.05, tier: vital}\n", "metrics.score.tier", None),
        (SCORE + "alpha: 0\n", "alpha", None),
        (SCORE + "alpha: 0.6\n", "alpha", None),
        (SCORE + "must_pass: smoke\n", "must_pass", None),
        (SCORE + "allow_differences: [task]\n", "allow_differences.0", None),
        (SCORE + "require: {isolation: docker}\n", "require.isolation", None),
        (SCORE + "on_inconclusive: pass\n", "on_inconclusive", None),
        (SCORE + "confirm: {failures: 0}\n", "confirm.failures", None),
        (SCORE + "early_stop: {alpha_share: 1}\n", "early_stop.alpha_share", None),
        (SCORE + SCORE, "'metrics' is there twice", None),
        ("metrics: {score: {margin: 0.1, margin: 0.2}}\n", "'margin' is there twice", None),
        ("alpha: 0.05\n", "decide nothing", None),
        ("[]\n", "does not hold a table", "examples/gate.yaml"),
        ("", "does not hold a table", "examples/gate.yaml"),
        ("a: [\n", "is not YAML", None),
        ("2026-99-99: 1\n", "is not YAML", None),
    ],
)
def test_what_a_policy_cannot_mean_is_refused(tmp_path: Path, text: str, place: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        load_policy(write(tmp_path, text))
    assert place in refused.value.message and "gate.yaml" in refused.value.message
    if hint is not None:
        assert hint in (refused.value.hint or "")


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_policy(tmp_path / "nowhere.yaml")


ENTRY = "- {task: a, owner: ann, reason: flaky port, expires: 2026-07-01}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks:\n" + ENTRY + ENTRY, "task 'a' is there twice"),
        ("tasks:\n- {task: a, reason: r, expires: 2026-07-01}\n", "owner"),
        ("tasks:\n- {task: a, owner: ann, expires: 2026-07-01}\n", "reason"),
        ("tasks:\n- {task: a, owner: ann, reason: '', expires: 2026-07-01}\n", "reason"),
        ("tasks:\n- {task: a, owner: ann, reason: r}\n", "expires"),
        ("tasks:\n- {task: a, owner: ann, reason: r, expires: soon}\n", "expires"),
        ("tasks:\n- {task: a, owner: ann, reason: r, expires: 2026-07-01, until: x}\n", "until"),
    ],
)
def test_a_quarantine_without_an_owner_reason_or_end_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_policy(write(tmp_path, SCORE + "quarantine: quarantine.yaml\n", text))
    assert said in refused.value.message and "quarantine.yaml" in refused.value.message


def test_a_quarantine_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quarantine\.yaml: No such file"):
        load_policy(write(tmp_path, SCORE + "quarantine: quarantine.yaml\n"))


def test_the_digest_covers_policy_and_quarantine_and_no_layout(tmp_path: Path) -> None:
    text = SCORE + "quarantine: quarantine.yaml\n"
    first = load_policy(write(tmp_path, text, "tasks:\n" + ENTRY))
    assert [e.task for e in first.quarantine.tasks] == ["a"]
    same = load_policy(write(tmp_path, "# reviewed\n" + text + "alpha: 0.05\n"))
    assert same.digest == first.digest and first.digest.startswith("sha256:")
    stricter = load_policy(write(tmp_path, text.replace("0.05", "0.04")))
    longer = load_policy(write(tmp_path, text, "tasks:\n" + ENTRY.replace("07-01", "08-01")))
    assert len({first.digest, stricter.digest, longer.digest}) == 3


def test_the_example_parses_and_shows_the_defaults() -> None:
    policy = load_policy(ROOT / "examples/gate.yaml").policy
    chosen = {"name", "metrics", "must_pass", "no_regression", "require"}
    assert {k for k in Policy.model_fields if getattr(policy, k) != getattr(Policy(), k)} == chosen
    assert policy.require.model_copy(update={"intact_evidence": False}) == Policy().require


def test_every_example_parses() -> None:
    for path in ROOT.glob("examples/**/gate*.yaml"):
        assert load_policy(path).policy.metrics
