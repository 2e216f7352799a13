"""A real registry on loopback, a front that makes it fail, and images to put into it."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dayfly.images.layout import INDEX_TYPE, MANIFEST_TYPE, encode, make_oci_layout
from dayfly.images.tar import Entry, Kind, write_tar

USER, PASSWORD = "tester", "secret"
HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
"""bcrypt of PASSWORD; the registry takes nothing else."""


def layer(name: str, content: bytes = b"content") -> bytes:
    return write_tar((Entry(b"", Kind.DIR), b""), (Entry(name.encode(), Kind.FILE, size=len(content)), content))


@dataclass
class Registry:
    """`docker-registry` serving a folder."""

    host: str
    folder: Path
    user: str = ""
    count: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def push(self, name: str, layers: Sequence[bytes], *, architecture: str = "amd64", docker: bool = False) -> str:
        """Push an image as `name`; returns the digest of its manifest."""
        self.count += 1
        layout = self.folder / f"layout-{self.count}"
        digest = make_oci_layout(layout, layers, {"WorkingDir": "/srv"}, architecture=architecture)
        options = ["--dest-tls-verify=false", *(["--dest-creds", self.user] if self.user else [])]
        options += ["--format", "v2s2"] if docker else ["--preserve-digests"]
        subprocess.run(
            ["skopeo", "copy", "--quiet", *options, f"oci:{layout}", f"docker://{self.host}/{name}"],
            check=True,
            timeout=60,
        )
        return digest

    def push_index(self, name: str, images: Sequence[tuple[str, dict[str, str]]]) -> str:
        """Push an index of images that are in the repository; returns its digest, as the registry says it."""
        repository, _, tag = name.partition(":")
        manifests = []
        for digest, platform in images:
            size = len(self.get(f"/v2/{repository}/manifests/{digest}"))
            manifests.append({"mediaType": MANIFEST_TYPE, "digest": digest, "size": size, "platform": platform})
        document = encode({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests})
        request = urllib.request.Request(
            f"{self.url}/v2/{repository}/manifests/{tag}",
            document,
            {"Content-Type": INDEX_TYPE},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.headers["Docker-Content-Digest"])

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Accept": MANIFEST_TYPE})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())


@contextmanager
def serving(folder: Path, *, private: bool = False) -> Iterator[Registry]:
    """A registry process with its data in `folder`, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = f"127.0.0.1:{taken.getsockname()[1]}"
    (folder / "data").mkdir(parents=True)
    config = f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
    config += f"http: {{addr: '{host}'}}\n"
    if private:
        (folder / "htpasswd").write_text(HTPASSWD)
        config += f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
    (folder / "config.yml").write_text(config)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        _wait_for(f"http://{host}/v2/", process)
        yield Registry(host, folder, f"{USER}:{PASSWORD}" if private else "")
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as e:
            e.close()
            return  # 401: it is there
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"the registry at {url} did not start")


@dataclass
class Fault:
    """What happens to requests whose path matches, the first `times` of them."""

    path: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    damage: str = ""
    """`flip` a byte, `cut` the body in half, `drip` it, `stall` before it."""
    times: int = 1_000_000


class Front(ThreadingHTTPServer):
    """An HTTP server that passes requests on to a registry, and faults in."""

    daemon_threads = True

    def __init__(self, registry: Registry) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.registry = registry
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        """`GET path` of every request, in order."""
        self.closing = threading.Event()
        self._lock = threading.Lock()

    def fault(self, path: str, **what: Any) -> None:
        """Let requests whose path matches fail; see `Fault`."""
        self.faults.append(Fault(path, **what))

    def fault_for(self, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def blobs_asked(self) -> list[str]:
        return [line.rpartition("/")[2] for line in self.asked if "/blobs/" in line]

    def handle_error(self, request: object, client_address: object) -> None:
        """skopeo hangs up when it has seen enough."""


class _Handler(BaseHTTPRequestHandler):
    server: Front

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        fault = self.server.fault_for(self.path)
        if fault is not None and fault.status != 200:
            self.send_response(fault.status)
            for name, value in fault.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        headers = {"Accept": ", ".join(self.headers.get_all("Accept", ["*/*"]))}
        request = urllib.request.Request(self.server.registry.url + self.path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                self._pass_on(answer.status, answer.headers, answer.read(), fault)
        except urllib.error.HTTPError as e:
            self._pass_on(e.code, e.headers, e.read(), fault)
            e.close()

    do_HEAD = do_GET

    def _pass_on(self, status: int, headers: object, body: bytes, fault: Fault | None) -> None:
        damage = fault.damage if fault else ""
        if damage == "stall":
            self.server.closing.wait(60)
        self.send_response(status)
        for name, value in headers.items():  # type: ignore[attr-defined]
            if name.lower() not in ("content-length", "connection", "date", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        match damage:
            case "flip":
                self.wfile.write(body[:-1] + bytes([body[-1] ^ 1]))
            case "cut":
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            case "drip":
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    if self.server.closing.wait(0.1):
                        return
            case _:
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fronting(registry: Registry) -> Iterator[Front]:
    front = Front(registry)
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield front
    finally:
        front.closing.set()
        front.shutdown()
        thread.join()
        front.server_close()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """One registry for all tests of a run: each uses repositories of its own."""
    with serving(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="session")
def private_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("private"), private=True) as found:
        yield found


@pytest.fixture
def front(registry: Registry) -> Iterator[Front]:
    with fronting(registry) as found:
        yield found


@pytest.fixture
def registries_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the registries.conf that holds in this test; nobody else's credentials do."""
    path = tmp_path / "registries.conf"

    def write(text: str) -> None:
        path.write_text(text)
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(path))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        monkeypatch.setenv("HOME", str(tmp_path))

    return write


@pytest.fixture
def use(registries_conf: Callable[[str], None]) -> Callable[..., None]:
    """Let the hosts be reached without TLS."""

    def insecure(*hosts: str) -> None:
        registries_conf("".join(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n' for host in hosts))

    return insecure
