"""Dockerfiles built with this host's buildah, which somebody must ask for."""

from __future__ import annotations

import pytest

from dayfly.errors import ConfigError, ImageError
from dayfly.images import ImageStore
from dayfly.images.builder import BuildSettings
from dayfly.images.builder.stored import stored

HOST = BuildSettings(builder="host")

DOCKERFILE = """\
FROM dayfly/demo-base AS made
ARG WORD=none
RUN echo "word=$WORD" >/made.txt
RUN --mount=type=secret,id=token sha256sum /run/secrets/token >/token.sum; cat /run/secrets/token
FROM dayfly/demo-base
ENV GREETING=hello
WORKDIR /srv
COPY --from=made /made.txt /token.sum ./
COPY . ./
"""


def test_the_host_builds_when_it_is_told_to(write, build, tmp_path):
    folder = write(DOCKERFILE, {"a.txt": "a", "skip.txt": "s", ".dockerignore": "skip.txt\n"})
    (tmp_path / "token").write_text("correct-horse-battery")
    output = bytearray()
    built = build(folder, HOST, output, args={"WORD": "given"}, secrets={"token": tmp_path / "token"})
    assert built.image.config.env["GREETING"] == "hello"
    assert built.image.config.workdir == "/srv"
    store = ImageStore()
    base, image = store.resolve("dayfly/demo-base"), stored(store, built.image)
    assert built.image.layers[: len(base.layers)] == base.layers  # kept once
    with image.open_layer(built.image.layers[-1], store._root) as layer:
        layer.seek(0)
        content = layer.read()
    assert b"word=given" in content and b"srv/a.txt" in content
    assert b"srv/skip.txt" not in content
    assert b"correct-horse" not in content and b"correct-horse" not in output


def test_a_failure_on_the_host_names_the_instruction(write, build):
    folder = write("FROM dayfly/demo-base\nENV A=1\nRUN echo wrong >&2; exit 7\n")
    with pytest.raises(ImageError) as caught:
        build(folder, HOST)
    assert f"{folder}/Dockerfile:3: RUN echo wrong" in caught.value.message
    assert "exit status 7" in caught.value.message and "wrong" in (caught.value.hint or "")


def test_a_build_on_the_host_ends_at_its_time_limit_with_all_its_processes(write, build):
    folder = write("FROM dayfly/demo-base\nRUN setsid sleep 4321.5 & sleep 1000\n")
    with pytest.raises(ImageError) as caught:
        build(folder, HOST, timeout_s=4.0)
    assert caught.value.cause == "build_timeout" and "RUN setsid" in caught.value.message
    assert not _running("sleep 4321.5")


def _running(word: str) -> list[str]:
    import psutil

    return [line for p in psutil.process_iter() if word in (line := " ".join(_cmdline(p)))]


def _cmdline(process) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    "wrong", [{"network": "none"}, {"allow": ("10.0.0.1",)}, {"files": {"ca": "/etc/hosts"}}], ids=str
)
def test_what_a_host_builder_cannot_keep_is_refused(write, build, wrong):
    folder = write("FROM scratch\nCOPY . /\n")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        build(folder, BuildSettings(builder="host", **wrong))
