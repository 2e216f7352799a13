"""A separate verifier on an image of its own: named, or built from tests/Dockerfile."""

from __future__ import annotations

import pytest

from dayfly.errors import TaskError
from dayfly.evidence import JobFolder
from dayfly.model import Outcome

TOML = """\
schema_version = "1.4"
artifacts = ["/app/result.txt"]
[environment]
docker_image = "fake/image"
workdir = "/app"
memory_mb = 256
storage_mb = 128
[verifier]
environment_mode = "separate"
{judge}
[dayfly]
verify = ["/app/look"]
"""


@pytest.fixture
def judged(make_task, plan_job, run_fake, tmp_path):
    def run(judge: str = "", dockerfile: bool = False, **settings):
        folder = make_task(solve="#!fake\nwrite result.txt done\n")
        (folder / "task.toml").write_text(TOML.format(judge=judge))
        (folder / "environment/look").write_text("#!fake\nprint task\nexpect /app/result.txt done\n")
        (folder / "tests/look").write_text("#!fake\nprint brought\n")
        if dockerfile:
            (folder / "tests/Dockerfile").write_text("FROM fake/judge\n")
        (record,) = run_fake(plan_job(["oracle"], retries=0, **settings)).records
        return record, JobFolder.open(tmp_path / "jobs", record.job_id).rollout_path(record.key)

    return run


def test_on_the_tasks_image_it_has_the_tasks_files(judged):
    record, place = judged()
    assert record.outcome is Outcome.PASSED, record.cause
    assert (place / "verifier/test-stdout.txt").read_text() == "task\n"
    assert [p.name for p in record.phases].count("image") == 1


@pytest.mark.parametrize(
    ("judge", "dockerfile"), [('[verifier.environment]\ndocker_image = "fake/judge"', False), ("", True)]
)
def test_an_image_of_its_own_has_nothing_of_the_task_but_the_artifacts(judged, judge, dockerfile):
    record, _ = judged(judge, dockerfile)
    # The fake's images are empty, so the program that such an image would bring is not there.
    assert (record.outcome, record.cause.kind) == (Outcome.VERIFIER_ERROR, "verifier_not_startable")
    assert [p.name for p in record.phases].count("image") == 2
    assert [v.id[-2:] for v in record.vms] == ["-a", "-v"]


def test_another_class_is_refused_before_anything_starts(judged):
    with pytest.raises(TaskError, match="image of its own"):
        judged(dockerfile=True, verifier_class="shared")
