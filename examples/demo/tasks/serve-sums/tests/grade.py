"""Asks the running server, with numbers drawn anew each time, while a silent client is connected."""

import os
import secrets
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading

ADDRESS = ("127.0.0.1", 8080)
START_S = 2.0
ANSWER_S = 30.0  # far more than an honest server needs on a slow, busy machine


def connect():
    """A connection; a server that is just starting gets a few seconds."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection(ADDRESS, timeout=ANSWER_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise grading.Failed(f"nothing answers on port 8080: {error}") from None
            time.sleep(0.1)


def get(path):
    """(status, body) of one request, with a bound on time and size."""
    deadline = time.monotonic() + ANSWER_S
    data = b""
    with connect() as stream:
        try:
            stream.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:8080\r\n\r\n".encode())
            while chunk := stream.recv(65536):
                data += chunk
                if len(data) > 1 << 20 or time.monotonic() > deadline:
                    raise grading.Failed(f"{path}: the answer does not end")
        except OSError as error:
            raise grading.Failed(f"{path}: {error}") from None
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise grading.Failed(f"{path}: the answer is not HTTP")
    return int(words[1]), body


def expect(path, status, judge_body=None):
    found, body = get(path)
    if found != status or (judge_body is not None and not judge_body(body)):
        raise grading.Failed(f"{path}: answered {found} with {body[:80]!r}")


def judge():
    with connect():  # says nothing
        expect("/health", 200, lambda body: body.strip() == b"ok")
        for size in (8, 20, 90):
            a, b = secrets.randbelow(1 << size), -secrets.randbelow(1 << size)
            wanted = {"sum": a + b}
            expect(
                f"/sum?a={a}&b={b}",
                200,
                lambda body, wanted=wanted: grading.same(grading.parse_json(body, "the answer"), wanted),
            )
        for query in ("", "?a=1", "?a=1&b=x", "?a=1.5&b=2", "?a=&b=2"):
            expect(f"/sum{query}", 400)
        expect(f"/{secrets.token_hex(4)}", 404)
        expect("/summary?a=1&b=2", 404)
    return {"reward": 1}


grading.grade(judge)
