"""Environment templates, and from paths to tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayfly.errors import ConfigError, NotFoundError, TaskError
from dayfly.tasks import find_tasks, resolve_env


def test_whole_values_are_filled_and_nothing_else():
    env = {
        "A": "${SET}",
        "B": "${UNSET:-fallback}",
        "C": "${SET:-unused}",
        "D": "${UNSET:-}",
        "E": "x${SET}",
        "F": "$SET",
        "G": "${EMPTY:-no}",
    }
    assert resolve_env(env, {"SET": "s", "EMPTY": ""}) == {
        "A": "s",
        "B": "fallback",
        "C": "s",
        "D": "",
        "E": "x${SET}",
        "F": "$SET",
        "G": "",
    }


def test_a_missing_variable_is_named():
    with pytest.raises(ConfigError, match="B_TOKEN, Z_TOKEN") as caught:
        resolve_env({"X": "${Z_TOKEN}", "Y": "${B_TOKEN}", "Z": "${C:-1}"}, {})
    assert caught.value.cause == "missing_variable"


@given(st.dictionaries(st.text(), st.text().filter(lambda v: not v.startswith("${"))))
def test_plain_values_stay_as_they_are(env):
    assert resolve_env(env, {}) == env


def test_a_task_a_folder_of_tasks_and_each_only_once(make_task, tmp_path):
    one, two = make_task(name="set/one"), make_task(name="set/two")
    (tmp_path / "set" / "notes").mkdir()
    make_task(name="set/.hidden")
    assert find_tasks([tmp_path / "set"]) == [one, two]
    assert find_tasks([two, tmp_path / "set", two / "task.toml"]) == [two, one]


def test_paths_without_tasks_are_errors(tmp_path):
    with pytest.raises(NotFoundError, match="no such folder"):
        find_tasks([tmp_path / "absent"])
    with pytest.raises(TaskError, match="holds no task"):
        find_tasks([tmp_path])
