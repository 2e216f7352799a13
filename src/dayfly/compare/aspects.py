"""In what two sides are the same, and in what they differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dayfly.compare import pairing
from dayfly.compare.model import Aspect, Difference
from dayfly.compare.pairing import short
from dayfly.results.side import Side, TaskResults

_PROMPT = re.compile("prompt|instruction|^system(_?message)?$", re.IGNORECASE)
_SECRET = re.compile("secret|passw|credential|auth|token(?!s)|key$|^env$", re.IGNORECASE)
"""Names of options whose values are shown nowhere, those of nested ones included."""
_LONGEST = 60
_MOST_VALUES = 3

Found = tuple[set[Aspect], list[Difference]]


def compare_aspects(base: Side, candidate: Side) -> tuple[tuple[Aspect, ...], tuple[Difference, ...]]:
    """(same, differences). An aspect that a side did not record, or does not have, is in neither."""
    same: set[Aspect] = set()
    differences: list[Difference] = []
    for add in (_agent, _options, _plan, _tasks, _host):
        more_same, more_differences = add(base, candidate)
        same |= more_same
        differences += more_differences
    order: tuple[Aspect, ...] = Aspect.__args__  # type: ignore[attr-defined]
    differences.sort(key=lambda d: order.index(d.aspect))
    varied = {d.aspect for d in differences}
    return tuple(a for a in order if a in same - varied), tuple(differences)


def _one(aspect: Aspect, old: Any, new: Any, said: Callable[[Any], str] = str) -> Found:
    if old == new:
        return {aspect}, []
    return set(), [Difference(aspect=aspect, base=said(old), candidate=said(new))]


def _agent(base: Side, candidate: Side) -> Found:
    def said(side: Side) -> str:
        return f"{side.agent} ({side.agent_kind}, {short(side.agent_digest)})"

    if (base.agent_digest, base.agent_kind) == (candidate.agent_digest, candidate.agent_kind):
        return {"agent"}, []
    return set(), [Difference(aspect="agent", base=said(base), candidate=said(candidate))]


def _options(base: Side, candidate: Side) -> Found:
    old, new = dict(_flat(base.agent_options)), dict(_flat(candidate.agent_options))
    same: set[Aspect] = {"options"}
    differences = []
    for key in sorted(old.keys() | new.keys()):
        aspect = aspect_of(key)
        if key in old and key in new and old[key] == new[key]:
            same.add(aspect)
        else:
            differences.append(
                Difference(aspect=aspect, base=_setting(old, key, aspect), candidate=_setting(new, key, aspect))
            )
    return same, differences


def aspect_of(key: str) -> Aspect:
    """What an option of an agent is about, as far as its name says."""
    if key.lower() == "model":
        return "model"
    return "prompt" if _PROMPT.search(key) else "options"


def _flat(options: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole name, such as `env.LANG`."""
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _setting(options: Mapping[str, Any], key: str, aspect: Aspect) -> str:
    if key not in options:
        value = "not set"
    elif any(_SECRET.search(part) for part in key.split(".")):
        value = "set, not shown"
    else:
        value = shorten(options[key])
    return value if aspect == "model" else f"{key}: {value}"


def shorten(value: Any) -> str:
    """A value on one line; of a long one the beginning, and a digest that tells it from another."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{text[:_LONGEST]}… (sha256:{digest}…)"


def _plan(base: Side, candidate: Side) -> Found:
    same, differences = _one("attempts", base.attempts, candidate.attempts)
    more_same, more = _one("seed", base.seed, candidate.seed)
    return same | more_same, differences + more


def _host(base: Side, candidate: Side) -> Found:
    found = [
        Difference(
            aspect="host", base=f"{k}: {shorten(base.host[k])}", candidate=f"{k}: {shorten(candidate.host[k])}"
        )
        for k in sorted(base.host.keys() & candidate.host.keys())
        if base.host[k] != candidate.host[k]
    ]
    alike = base.host and not found and base.host.keys() == candidate.host.keys()
    return ({"host"} if alike else set()), found


# --- aspects of tasks --------------------------------------------------------------------------------


def _tasks(base: Side, candidate: Side) -> Found:
    both = [(t, candidate.tasks[n]) for n, t in base.tasks.items() if n in candidate.tasks]
    same: set[Aspect] = set()
    differences = list(_only_once(base, candidate))
    for aspect, differs, known, said in _OF_TASKS:
        varied = [(old, new) for old, new in both if differs(old, new)]
        if varied:
            values = (_values(said(t) for t in side) for side in zip(*varied, strict=True))
            old, new = values
            differences.append(Difference(aspect=aspect, base=old, candidate=new, tasks=len(varied)))
        elif both and all(known(old) and known(new) for old, new in both):
            same.add(aspect)
    return same, differences


def _only_once(base: Side, candidate: Side) -> Iterator[Difference]:
    gone, new = len(base.tasks.keys() - candidate.tasks.keys()), len(candidate.tasks.keys() - base.tasks.keys())
    if gone or new:
        yield Difference(aspect="task", base=f"{gone} only here", candidate=f"{new} only here", tasks=gone + new)


def _values(values: Iterable[str]) -> str:
    found = sorted(set(values))
    more = len(found) - _MOST_VALUES
    return ", ".join(found[:_MOST_VALUES]) + (f" and {more} more" if more > 0 else "")


def _limits(task: TaskResults) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairing.limits(task) if value)


def _limits_known(task: TaskResults) -> bool:
    return task.agent_limit_s is not None and task.verifier_timeout_s is not None and task.machine is not None


Differs = Callable[[TaskResults, TaskResults], str]
_OF_TASKS: tuple[tuple[Aspect, Differs, Callable[[TaskResults], object], Callable[[TaskResults], str]], ...] = (
    ("task", pairing.task_differs, lambda t: t.task_digest, lambda t: short(t.task_digest)),
    ("verifier", pairing.verifier_differs, lambda t: t.verifier_digest, lambda t: short(t.verifier_digest)),
    ("limits", pairing.limits_differ, _limits_known, _limits),
    (
        "image",
        pairing.image_differs,
        lambda t: t.disk_digests,
        lambda t: ", ".join(map(short, sorted(set(t.disk_digests)))),
    ),
    (
        "isolation",
        pairing.isolation_differs,
        lambda t: t.isolation,
        lambda t: pairing.weakest_isolation(t.isolation),
    ),
    (
        "verifier class",
        pairing.verifier_class_differs,
        lambda t: t.verifier_classes,
        lambda t: pairing.weakest_class(t.verifier_classes),
    ),
)
"""Aspect, how two tasks differ in it, whether a task has it recorded, and what it is."""
