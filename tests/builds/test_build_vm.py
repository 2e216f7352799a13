"""Dockerfiles built in real builder VMs."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import anyio
import pytest

from dayfly.errors import ImageError
from dayfly.images import ImageStore
from dayfly.images.builder import BuildSettings, ImageBuilder
from dayfly.images.builder.builder_image import scratch_folder
from dayfly.images.builder.stored import stored
from dayfly.job import parse_job, plan_new, run_job
from dayfly.model import Machine
from dayfly.protocols import StartOptions

pytestmark = pytest.mark.vm

SETTINGS = BuildSettings(cpus=1, memory_mb=768, storage_mb=1024, network="none")
SECRET = "correct-horse-battery-staple"

EVERYTHING = """\
# escape=\\
ARG BASE=dayfly/demo-base
FROM $BASE AS made
ARG WORD=none
RUN echo "word=$WORD" >/made.txt
RUN --mount=type=secret,id=token \\
    # a comment within
    sha256sum /run/secrets/token | cut -c1-8 >/token.sum && cat /run/secrets/token
FROM ${BASE}:latest
ENV GREETING="hello there" PATH=/opt/bin:$PATH
RUN useradd --uid 1234 bob && mkdir -p /data && echo kept >/data/content
WORKDIR /srv/app
COPY --from=made /made.txt /token.sum /
COPY --chown=bob:bob . ./
RUN <<END
set -e
cat "$EXTRA_FILE" >/srv/extra
python3 - <<PY
import urllib.request, urllib.error
print("allowed:", urllib.request.urlopen("http://127.0.0.2:$PORT/", timeout=20).read().decode())
PY
END
VOLUME /data
USER bob
"""


def test_everything_that_a_dockerfile_says_is_so_in_a_vm(build, write, hypervisor, tmp_path):
    folder = write(
        EVERYTHING,
        {
            "src/a.txt": "a",
            "secret.env": "x",
            "logs/b.log": "b",
            "logs/keep.log": "k",
            ".dockerignore": "secret.env\nlogs/*\n!logs/keep.log\n",
        },
    )
    (folder / "src/run.sh").write_text("#!/bin/sh\n")
    (folder / "src/run.sh").chmod(0o700)
    (folder / "src/link").symlink_to("a.txt")
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "extra").write_text("from the host")
    output = bytearray()
    with serving() as port:
        settings = SETTINGS.model_copy(
            update={
                "network": "proxied",
                "allow": (f"127.0.0.2:{port}",),
                "env": {"EXTRA_FILE": "/dev/dayfly/extra", "PORT": str(port), "no_proxy": ""},
                "files": {"extra": tmp_path / "extra"},
            }
        )
        built = build(folder, settings, output, args={"WORD": "given"}, secrets={"token": tmp_path / "token"})
    text = output.decode()
    assert "allowed: served" in text
    assert SECRET not in text and SECRET not in built.log.read_text() and "***" in text
    store = ImageStore()
    assert_nowhere(store, built.image, [SECRET.encode(), b"/dev/dayfly", b"dayfly-base", b"3128"])
    assert built.image.config.user == "bob"
    assert built.image.config.workdir == "/srv/app"
    assert built.image.config.env["GREETING"] == "hello there"
    assert built.image.config.env["PATH"].startswith("/opt/bin:/usr/local/sbin")
    assert built.image.volumes == ("/data",)
    assert seen_in_vm(hypervisor, store, built.image, tmp_path) == [
        "bob 1234 /srv/app hello there",
        "word=given",
        "content kept",
        "from the host",
        "./.dockerignore 644 bob",
        "./Dockerfile 644 bob",
        "./logs 755 bob",
        "./logs/keep.log 644 bob",
        "./src 755 bob",
        "./src/a.txt 644 bob",
        "./src/link 777 bob",
        "./src/run.sh 755 bob",
    ]


def seen_in_vm(hypervisor, store, image, tmp_path) -> list[str]:
    script = (
        'echo "$(id -un) $(id -u) $PWD $GREETING"; cat /made.txt; echo "$(ls /data) $(cat /data/content)"\n'
        "cat /srv/extra; echo; find . -mindepth 1 -printf '%p %m %u\\n' | sort"
    )

    async def main() -> list[str]:
        with store.using(store.disk(image)) as disk:
            options = StartOptions(vm_id="built-t", writable=tmp_path / "built.img")
            async with hypervisor.start(disk, Machine(memory_mib=512, storage_mib=1024), options) as vm:
                result = await vm.exec(["/bin/sh", "-c", script], timeout_s=60)
                assert result.ok, result.stderr.text
                return result.stdout.text.splitlines()

    return anyio.run(main)


def assert_nowhere(store, image, needles) -> None:
    """Neither in the configuration nor in any layer of the build."""
    held = stored(store, image)
    documents = [held.blob(image.digest), held.blob(held.manifest["config"]["digest"])]
    for path in documents:
        assert not [n for n in needles if n in path.read_bytes()]
    with held.open_layer(image.layers[-1], store._root) as layer:
        layer.seek(0)
        content = layer.read()
    assert not [n for n in needles if n in content]


class serving:
    """A web server on a loopback address of this host."""

    def __enter__(self) -> int:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"served")

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.2", 0), Answer)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self.server.server_address[1]

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_a_failure_names_the_instruction_and_is_not_tried_twice(write, build, hypervisor):
    folder = write(
        "FROM dayfly/demo-base\nENV A=1\n\nRUN echo fine && \\\n    echo wrong >&2 && \\\n    exit 7\nRUN true\n"
    )
    builder = ImageBuilder(ImageStore(), lambda: hypervisor, SETTINGS)
    with pytest.raises(ImageError) as first:
        build(folder, builder=builder, renew=False)
    assert f"{folder}/Dockerfile:4: RUN echo fine" in first.value.message
    assert "exit status 7" in first.value.message
    assert "wrong" in (first.value.hint or "")
    assert first.value.cause == "build_failed"
    with pytest.raises(ImageError) as second:
        build(folder, builder=builder, renew=False)
    assert second.value is first.value


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        ("RUN cat /dev/zero >/big", "filled the builder's 1024 MiB disk"),
        ("RUN tail /dev/zero", "768 MiB of memory"),
        ("RUN bomb() { bomb | bomb & bomb; }; bomb; sleep 1000", "RUN bomb()"),
    ],
    ids=["disk", "memory", "forks"],
)
def test_a_build_that_takes_all_it_can_ends_with_a_clear_error(build, write, instruction, says):
    folder = write(f"FROM dayfly/demo-base\n{instruction}\n")
    with pytest.raises(ImageError) as caught:
        build(folder, timeout_s=30.0 if "bomb" in instruction else 120.0)
    assert says in str(caught.value), caught.value
    assert caught.value.cause in ("build_failed", "build_timeout", "builder_lost")


SPY = """\
FROM dayfly/demo-base
RUN ps ax >/seen; cat /proc/*/environ >>/seen 2>/dev/null; mount >>/seen; ls -R /dev >>/seen; \
    mknod /disk b 254 0 && cat /disk | head -c 100 >>/seen; echo done
ARG PORT
RUN <<END cat >/spy.py && python3 /spy.py >/found && rm /spy.py
import os, socket, urllib.error, urllib.request
def is_open(port):
    with socket.socket() as s:
        return not s.connect_ex(("127.0.0.1", port))
print("open:", [p for p in range(1, 10_000) if is_open(p)])
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ""
for host in ("127.0.0.2", "localhost", "169.254.169.254"):
    try:
        print(host, urllib.request.urlopen(f"http://{host}:{os.environ['PORT']}/", timeout=30).read())
    except urllib.error.HTTPError as error:
        print(host, error.code)
END
"""


def test_a_build_that_looks_around_sees_nothing_of_the_host(build, write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_TOKEN", "a-token-of-the-host")
    with serving() as port:
        settings = SETTINGS.model_copy(update={"network": "proxied"})
        built = build(write(SPY), settings, args={"PORT": str(port)})
    found = contents(built.image)
    assert b"buildah" in found["seen"]  # it saw its builder
    for foreign in (b"a-token-of-the-host", b"pytest", str(tmp_path).encode()):
        assert foreign not in found["seen"]
    assert found["found"].decode().splitlines() == [
        "open: [3128, 3129]",  # both ends of its own relay
        "127.0.0.2 403",
        "localhost 403",
        "169.254.169.254 403",
    ]
    assert f"a build may not reach 127.0.0.2:{port}" in built.log.read_text()


def test_layers_are_kept_for_the_next_build_of_the_same_file(write, build, hypervisor, tmp_path):
    output = bytearray()
    folder = tmp_path / "builds"
    folder.mkdir()
    (folder / "disks").symlink_to(scratch_folder() / "disks")  # made once for all tests
    builder = ImageBuilder(ImageStore(), lambda: hypervisor, SETTINGS, on_output=output.extend, folder=folder)
    source = write("FROM dayfly/demo-base\nRUN cat /proc/sys/kernel/random/uuid >/made\nCOPY a.txt /\nRUN true\n")
    made = []
    for text in ("one", "two"):
        (source / "a.txt").write_text(text)
        output.clear()
        built = build(source, builder=builder, layers=True)
        made.append((contents(built.image), output.decode()))
    (first, said), (second, said_again) = made
    assert "Using cache" not in said and "Using cache" in said_again
    assert first["made"] == second["made"]
    assert (first["a.txt"], second["a.txt"]) == (b"one", b"two")


def contents(image) -> dict[str, bytes]:
    """Small files that the layers of the build added."""
    store, found = ImageStore(), {}
    for digest in image.layers[1:]:
        with stored(store, image).open_layer(digest, store._root) as layer:
            layer.seek(0)
            with tarfile.open(fileobj=layer) as tar:
                found |= {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
    return found


def test_two_builders_at_once_build_once(write, base_disk, forget):
    folder = write("FROM scratch\nCOPY once.txt /\n", {"once.txt": f"{id(object())}"})
    (folder / "unique").write_text(str(folder))
    command = [sys.executable, "-m", "dayfly.cli", "image", "build", str(folder), "--network", "none", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    forget(json.loads(outputs[0][0])["images"][0]["digest"])
    assert sorted('"cached": true' in out.decode() for out, _ in outputs) == [False, True]


def test_a_task_of_dockerfiles_alone_runs(tmp_path, base_disk, forget):
    """One for the agent's VM, one for the verifier's, which brings the tests."""
    task = tmp_path / "task"
    for path, text in {
        "task.toml": 'schema_version = "1.4"\nartifacts = ["/srv/work/result.txt"]\n'
        "[environment]\nmemory_mb = 512\nstorage_mb = 256\n[verifier]\nenvironment_mode = 'separate'\n",
        "instruction.md": "Write done into result.txt.\n",
        "environment/Dockerfile": "FROM dayfly/demo-base\nWORKDIR /srv/work\nCOPY given.txt .\n",
        "environment/given.txt": f"given {tmp_path}\n",
        "solution/solve.sh": "#!/bin/sh\ntest -f given.txt && echo done > result.txt\n",
        "tests/Dockerfile": "FROM dayfly/demo-base\nCOPY test.sh /tests/\nRUN echo done >/wanted\n",
        "tests/test.sh": "#!/bin/sh\ncmp /wanted /srv/work/result.txt && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    job = parse_job({"tasks": [str(task)], "agents": ["oracle", "no-op"], "retries": 0}, "test")
    result = anyio.run(lambda: run_job(plan_new(job, tmp_path, tmp_path / "jobs")))
    lines = (tmp_path / "jobs" / result.job_id / "events.jsonl").read_text().splitlines()
    built = [e for e in map(json.loads, lines) if e["event"] == "image_built"]
    for event in built:
        forget(event["image"])
    outcomes = {r.agent: (r.outcome.value, r.cause) for r in result.records}
    assert outcomes["oracle"][0] == "passed", outcomes
    assert outcomes["no-op"][0] == "failed", outcomes
    assert [Path(e["dockerfile"]).parent.name for e in built] == ["environment", "tests"]
