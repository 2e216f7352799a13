"""What an image costs: to make its disk, to use it again, and to keep many that share a base.

    python benchmarks/images.py [--tar IMAGE.tar] [--sizes 300 1000] [--samples 3] [--sharing 50] [--json]

(a) image in a registry → disk ÷ the same by hand (skopeo copy, umoci unpack, mksquashfs lz4): `over_by_hand`
(b) the name of an image that is here → a disk that a VM can use, in a new process: `again_ms`
(c) disk used for images that share a base ÷ the sum of their file trees: `kept_over_flat`

The images are the demo's root filesystem and, above it, layers of text and of bytes that do not compress, until the
size is reached; the registry is Debian's docker-registry on loopback. Both ways alternate and begin with nothing.
Wants root, and the packages docker-registry, skopeo, umoci and squashfs-tools.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayfly.images import ImageStore
from dayfly.images.layout import make_oci_layout
from dayfly.images.tar import Entry, Kind, write_tar

MIB = 2**20
LAYER_MIB = 100
AGAIN = """\
import sys, time
from pathlib import Path
from dayfly.images import ImageStore
started = time.perf_counter()
store = ImageStore(Path(sys.argv[1]))
store.disk(store.pull(sys.argv[2]))
print((time.perf_counter() - started) * 1000)
"""


def run(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=900, env=env)
    return done.stdout


def layer(mib: int, seed: int) -> bytes:
    """Half text that compresses to a third or so, half bytes that do not, in files of 4 KiB to 4 MiB."""
    source = random.Random(seed)
    words = [source.randbytes(source.randint(2, 9)).hex().encode() for _ in range(4000)]
    members, left, number = [], mib * MIB, 0
    while left > 0:
        size = min(left, 4096 << source.randint(0, 10))
        text = number % 2 == 0
        content = b" ".join(source.choices(words, k=size // 8 + 1))[:size] if text else source.randbytes(size)
        members.append((Entry(b"opt/%d/%d" % (seed, number), Kind.FILE, 0o644, size=len(content)), content))
        left, number = left - len(content), number + 1
    return write_tar(*members)


def packed(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)  # without the time: a shared layer must have one digest


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{host}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\n"
    )
    (folder / "registries.conf").write_text(f"[[registry]]\nlocation = '{host}'\ninsecure = true\n")
    os.environ["CONTAINERS_REGISTRIES_CONF"] = str(folder / "registries.conf")
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        time.sleep(2)
        yield host
    finally:
        process.terminate()
        process.wait()


def push(folder: Path, reference: str, layers: list[bytes]) -> None:
    layout = folder / "layout"
    make_oci_layout(layout, layers)
    run("skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}", f"docker://{reference}")
    shutil.rmtree(layout)


def ours_s(folder: Path, reference: str) -> float:
    started = time.perf_counter()
    store = ImageStore(folder / "store")
    store.disk(store.pull(reference))
    return time.perf_counter() - started


def by_hand_s(folder: Path, reference: str) -> float:
    started = time.perf_counter()
    run("skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{reference}", f"oci:{folder / 'oci'}:it")
    run("umoci", "unpack", "--image", f"{folder / 'oci'}:it", folder / "bundle")
    run("mksquashfs", folder / "bundle" / "rootfs", folder / "disk", "-comp", "lz4", "-noappend", "-quiet")
    os.sync()  # dayfly's disk is safe on the host's before it counts
    return time.perf_counter() - started


def compare(work: Path, reference: str, samples: int) -> dict[str, float]:
    ours, theirs, again = [], [], []
    for _ in range(samples):
        for seconds, how in ((ours, ours_s), (theirs, by_hand_s)):
            with tempfile.TemporaryDirectory(dir=work) as folder:
                os.sync()
                seconds.append(how(Path(folder), reference))
                if how is ours_s:
                    again.append(float(run(sys.executable, "-c", AGAIN, Path(folder) / "store", reference)))
    return {
        "ours_s": round(statistics.median(ours), 2),
        "by_hand_s": round(statistics.median(theirs), 2),
        "over_by_hand": round(statistics.median(ours) / statistics.median(theirs), 2),
        "again_ms": round(statistics.median(again), 1),
    }


def sharing(work: Path, host: str, base: bytes, count: int) -> dict[str, float]:
    """`count` images: the same base, and 5 MiB of their own each."""
    store, flat, packed_base = ImageStore(work / "shared"), 0, packed(base)
    for number in range(count):
        own = layer(5, 1000 + number)
        push(work, f"{host}/shared:{number}", [packed_base, packed(own)])
        store.disk(store.pull(f"{host}/shared:{number}"))
        flat += len(base) + len(own)
    kept = sum(file.stat().st_blocks * 512 for file in (work / "shared").rglob("*") if file.is_file())
    return {"images": count, "kept_mib": round(kept / MIB), "kept_over_flat": round(kept / flat, 2)}


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tar", type=Path, default=cache / "dayfly" / "base" / "demo-base.tar")
    parser.add_argument("--sizes", type=int, nargs="*", default=[300, 1000], help="MiB")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--sharing", type=int, default=50, help="how many images share a base")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    base = given.tar.read_bytes()
    found: dict[str, object] = {"benchmark": "images", "samples": given.samples}
    with tempfile.TemporaryDirectory(dir=cache) as folder, registry(Path(folder)) as host:
        for size in given.sizes:
            rest = max(0, size - len(base) // MIB)
            parts = [min(LAYER_MIB, rest - at) for at in range(0, rest, LAYER_MIB)]
            reference = f"{host}/image:{size}"
            push(
                Path(folder),
                reference,
                [packed(base), *(packed(layer(mib, seed)) for seed, mib in enumerate(parts))],
            )
            found[f"{size} MiB"] = compare(Path(folder), reference, given.samples)
        if given.sharing:
            found["sharing"] = sharing(Path(folder), host, base, given.sharing)
    print(json.dumps(found, indent=2 if given.json else None))


if __name__ == "__main__":
    main()
