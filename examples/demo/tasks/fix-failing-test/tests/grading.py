"""What every grader of these tasks needs; the same file in each of them.

The rules: the candidate's code never runs in the grader's process, never as root and never where it can read
/tests or write /logs/verifier; whatever the candidate left or did is a failure to be scored, and only a fault
of the grader itself ends without a reward.
"""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

TESTS = "/tests"
VERDICT = "/logs/verifier"
CANDIDATE_UID = 64999  # nobody's: not root, not the agent's
OUTPUT_LIMIT = 1 << 20
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


def run_candidate(argv, files=None, stdin=b"", timeout_s=10):
    """Run `argv` as an unprivileged user in a fresh folder that holds `files`: name → (bytes, mode).

    Returns (exit status, stdout). A timeout raises `Failed`; output is cut at `OUTPUT_LIMIT`.
    """
    folder = tempfile.mkdtemp(prefix="candidate-")
    try:
        for name, (data, mode) in (files or {}).items():
            with open(os.path.join(folder, name), "xb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode)
                os.fchown(file.fileno(), CANDIDATE_UID, CANDIDATE_UID)
        os.chmod(folder, 0o700)
        os.chown(folder, CANDIDATE_UID, CANDIDATE_UID)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
            given.write(stdin)
            given.seek(0)
            status = _run_limited(argv, folder, given, out, timeout_s)
            out.seek(0)
            return status, out.read(OUTPUT_LIMIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_limited(argv, folder, given, out, timeout_s):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * OUTPUT_LIMIT, 8 * OUTPUT_LIMIT))
        resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (int(timeout_s), int(timeout_s)))
        resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))

    try:
        process = subprocess.Popen(
            argv,
            stdin=given,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"},
            user=CANDIDATE_UID,
            group=CANDIDATE_UID,
            extra_groups=[],
            start_new_session=True,
            preexec_fn=limit,
        )
    except OSError as error:
        raise Failed(f"{argv[0]} cannot be started: {error.strerror}") from None
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{os.path.basename(argv[0])} did not end within {timeout_s} s") from None
    finally:
        _kill_candidates()
        process.wait()


def _kill_candidates():
    """End every process of the candidate's user, also those that left its session."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(CANDIDATE_UID, CANDIDATE_UID, CANDIDATE_UID)
            os.setresuid(CANDIDATE_UID, CANDIDATE_UID, CANDIDATE_UID)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
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
