"""What the host reads out of a Dockerfile: lines of instructions, and the images to have ready."""

from __future__ import annotations

import pytest

from dayfly.errors import ImageError
from dayfly.images.builder.dockerfile import expand, images_of, instruction_at, last_step, parse_dockerfile
from dayfly.images.builder.stock import complete_name

TEXT = """\
# syntax=docker/dockerfile:1
# escape=`
ARG TAG=3.13
from python:${TAG} as base

RUN echo one `
    # a comment within
    && echo two
COPY --from=ghcr.io/x/uv:1 /uv /bin/
RUN <<A cat && cat <<-"B"
FROM not:an-image
A
\tB
USER bob
FROM base
RUN --mount=type=bind,from=tools,target=/t true
"""


def test_instructions_have_their_lines_stages_and_steps():
    found = [(i.word, i.line, i.stage, i.step) for i in parse_dockerfile(TEXT)]
    assert found == [
        ("ARG", 3, 0, 1),
        ("FROM", 4, 1, 1),
        ("RUN", 6, 1, 2),
        ("COPY", 9, 1, 3),
        ("RUN", 10, 1, 4),
        ("USER", 14, 1, 5),
        ("FROM", 15, 2, 1),
        ("RUN", 16, 2, 2),
    ]
    assert parse_dockerfile(TEXT)[2].rest == "echo one && echo two"


@pytest.mark.parametrize(
    ("args", "images"),
    [
        ({}, ("python:3.13", "ghcr.io/x/uv:1", "tools")),
        ({"TAG": "3.12"}, ("python:3.12", "ghcr.io/x/uv:1", "tools")),
    ],
)
def test_the_images_that_a_build_takes_from_outside(args, images):
    assert images_of(parse_dockerfile(TEXT), args) == images


def test_stages_by_number_and_scratch_are_no_images():
    text = "FROM scratch AS a\nFROM A\nCOPY --from=0 /x /x\nCOPY --from=a /y /y\n"
    assert images_of(parse_dockerfile(text), {}) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RUN true\n", "no FROM"),
        ("", "no FROM"),
        ("ARG BASE\nFROM $BASE\n", "line 2: 'FROM $BASE' names no image"),
        ("FROM --platform=linux/riscv64 debian\n", "another platform"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_starts(text, says):
    with pytest.raises(ImageError) as caught:
        images_of(parse_dockerfile(text), {})
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A/${B}", "a/"),
        ("${A:-x}${B:-x}${C-y}${B-z}", "axy"),
        ("${A:+set}${B:+set}", "set"),
        (r"\$A", "$A"),
        ('"quoted $A"', "quoted a"),
    ],
)
def test_variables(text, value):
    assert expand(text, {"A": "a", "B": ""}) == value


@pytest.mark.parametrize(
    ("log", "added", "line"),
    [
        (b"[1/2] STEP 2/5: RUN echo\n", 0, 6),
        (b"[1/2] STEP 3/6: RUN echo\n", 1, 6),
        (b"[1/2] STEP 2/5: RUN echo\nout\n[2/2] STEP 2/2: RUN x\nSTEP\n", 0, 16),
        (b"nothing\n", 0, None),
        (b"[7/9] STEP 99/99: RUN echo\n", 0, None),
    ],
)
def test_a_builders_step_is_a_line_of_the_file(log, added, line):
    found = instruction_at(parse_dockerfile(TEXT), last_step(log), added)
    assert (found.line if found else None) == line


@pytest.mark.parametrize(
    ("written", "complete"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.13", "docker.io/library/python:3.13"),
        ("team/base", "docker.io/team/base:latest"),
        ("index.docker.io/team/base:1", "docker.io/team/base:1"),
        ("docker.io/python:3", "docker.io/library/python:3"),
        ("localhost:5000/x:2", "localhost:5000/x:2"),
        ("ghcr.io/a/b:1@sha256:" + "0" * 64, "ghcr.io/a/b@sha256:" + "0" * 64),
    ],
)
def test_a_base_is_known_to_the_guest_by_its_complete_name(written, complete):
    assert complete_name(written) == complete
