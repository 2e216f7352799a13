"""What every grader of these tasks needs; the same file in each of them.

The rules: the candidate's code never runs in the grader's process, never as root and never where it can read
/tests or write /logs/verifier; whatever the candidate left or did is a failure to be scored, and only a fault
of the grader itself ends without a reward.
"""

import json
import os
import stat
import sys

TESTS = "/tests"
VERDICT = "/logs/verifier"
CANDIDATE_UID = 64999  # nobody's: not root, not the agent's
OUTPUT_LIMIT = 1 << 20
TIMEOUT_S = 60  # far more than any honest work needs on a slow, busy machine
PYTHON = ["/usr/bin/python3", "-I", "-S", "-B"]


class Failed(Exception):
    """The candidate's work is not right; says why."""


def read_file(path, limit=OUTPUT_LIMIT):
    """The bytes of a regular file that is no link and no larger than `limit`. Raises `Failed`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Failed(f"{path} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Failed(f"{path} is larger than {limit} bytes")
    return data


def read_text(path, limit=OUTPUT_LIMIT):
    """As `read_file`, for UTF-8."""
    try:
        return read_file(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise Failed(f"{path} is not UTF-8") from None


def parse_json(data, what):
    """JSON without duplicate keys, NaN or infinities. Raises `Failed`."""

    def pairs(items):
        if len({key for key, _ in items}) != len(items):
            raise ValueError("duplicate key")
        return dict(items)

    def constant(name):
        raise ValueError(name)

    try:
        return json.loads(data, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Failed(f"{what} is not JSON: {error}") from None


def same(a, b):
    """Equal in value and type: 1, 1.0, True and "1" all differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def run_candidate(argv, files=None, stdin=b"", timeout_s=TIMEOUT_S):
    """Run `argv` as an unprivileged user in a fresh folder that holds `files`: name → (bytes, mode).

    Returns (exit status, stdout); a signal's number is negative. A timeout raises `Failed`; output is cut at
    `OUTPUT_LIMIT`. The module subprocess could do this, but takes longer to import than a verdict should.
    """
    folder = f"/tmp/candidate-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    for name, (data, mode) in (files or {}).items():
        with open(os.path.join(folder, name), "xb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            os.fchown(file.fileno(), CANDIDATE_UID, CANDIDATE_UID)
    os.chown(folder, CANDIDATE_UID, CANDIDATE_UID)
    given, out = os.memfd_create("stdin"), os.memfd_create("stdout")
    with open(given, "w+b", buffering=0) as given_file, open(out, "w+b", buffering=0) as out_file:
        given_file.write(stdin)
        given_file.seek(0)
        child = os.fork()
        if child == 0:
            _become_candidate(argv, folder, given, out, timeout_s)
        status = _wait(child, timeout_s, os.path.basename(argv[0]))
        out_file.seek(0)
        return status, out_file.read(OUTPUT_LIMIT)


def _become_candidate(argv, folder, given, out, timeout_s):
    """In the child: give up every right, then start the program. Does not return."""
    import resource

    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(given, 0)
        os.dup2(out, 1)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        os.closerange(3, 256)
        for limit, value in (
            (resource.RLIMIT_FSIZE, 8 * OUTPUT_LIMIT),
            (resource.RLIMIT_AS, 256 << 20),
            (resource.RLIMIT_CPU, int(timeout_s)),
            (resource.RLIMIT_NPROC, 64),
        ):
            resource.setrlimit(limit, (value, value))
        os.setgroups([])
        os.setresgid(CANDIDATE_UID, CANDIDATE_UID, CANDIDATE_UID)
        os.setresuid(CANDIDATE_UID, CANDIDATE_UID, CANDIDATE_UID)
        os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"})
    finally:
        os._exit(127)


def _wait(child, timeout_s, what):
    """The child's exit status; afterwards nothing of the candidate's user runs any more."""
    import select

    watch = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    ended = poll.poll(timeout_s * 1000)
    os.close(watch)
    _kill_candidates()
    _, status = os.waitpid(child, 0)
    if not ended:
        raise Failed(f"{what} did not end within {timeout_s} s")
    return os.waitstatus_to_exitcode(status)


def _kill_candidates():
    """End every process of the candidate's user, also those that left its session."""
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(CANDIDATE_UID, CANDIDATE_UID, CANDIDATE_UID)
            os.kill(-1, 9)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


CALLER = """
import importlib.util, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
calls = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("candidate", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
results = []
for name, arguments in calls:
    try:
        results.append(["returned", getattr(module, name)(*arguments)])
    except Exception as error:
        results.append(["raised", type(error).__name__])
json.dump(results, answers)
answers.flush()
"""


def call_candidate(source, calls):
    """Call functions of a Python file in a process of its own: [(name, arguments)] → [[how, value]].

    Values cross as JSON, so an object that claims to equal everything is just not an answer.
    """
    files = {"candidate.py": (source, 0o444), "call.py": (CALLER.encode(), 0o444)}
    argv = [*PYTHON, "call.py", "candidate.py"]
    status, out = run_candidate(argv, files, json.dumps(calls).encode())
    results = parse_json(out, "the candidate's answer") if out else None
    if status != 0 or not isinstance(results, list) or len(results) != len(calls):
        raise Failed(f"the candidate's code gave no answer (status {status})")
    return results


def grade(judge):
    """Call `judge()` → {name: reward}, and write the verdict as the very last step.

    `Failed` is reward 0. Any other exception is a fault of the grader: no reward is written.
    """
    os.chmod(TESTS, 0o700)
    os.chmod(VERDICT, 0o700)
    try:
        rewards = judge()
    except Failed as reason:
        print(f"failed: {reason}", flush=True)
        rewards = {"reward": 0}
    print(f"rewards: {rewards}", flush=True)
    whole = os.path.join(VERDICT, "reward.json")
    with open(whole + ".new", "x") as file:
        json.dump(rewards, file)
    os.rename(whole + ".new", whole)
    sys.exit(0)
