"""The rate of this host's time stamp counter.

Under TCG a guest sees the host's counter, and a microvm guest has no other clock to measure it against:
without `tsc_early_khz` it hangs at random at boot, with a wrong value its clock runs wrong. /proc/cpuinfo
shows the current, not the counter's, frequency and the kernel log is not readable for everyone, so we measure.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import time
from pathlib import Path

RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx,32; or rax,rdx; ret
WINDOW_S = 0.1
SAME = 1e-4
"""Two measurements this close (100 ppm, 6 ms in a minute) are the same counter; so templates stay valid."""


def host_tsc_khz(cache: Path) -> int:
    """kHz of the host's counter, stable from call to call on one host; 0 where there is none (aarch64)."""
    if platform.machine() != "x86_64":
        return 0
    measured = measure_tsc_khz()
    known = cache / "host" / "tsc.json"
    try:
        before = int(json.loads(known.read_bytes())["khz"])
    except (OSError, ValueError, KeyError, TypeError):
        before = 0
    if before and abs(measured - before) / before < SAME:
        return before
    known.parent.mkdir(parents=True, exist_ok=True)
    fresh = known.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"khz": measured}))
    fresh.replace(known)
    return measured


def measure_tsc_khz(window_s: float = WINDOW_S) -> int:
    """Count ticks against the raw monotonic clock (which time synchronisation does not bend)."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(RDTSC)
        view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(view))
        first = _sample(read)
        time.sleep(window_s)
        last = _sample(read)
        del read, view
    return round((last[0] - first[0]) / (last[1] - first[1]) * 1e6)


def _sample(read: ctypes._CFunctionType) -> tuple[int, int]:
    """(ticks, ns) from the tightest of some tries: a preemption between the two reads spoils a sample."""
    best = (1 << 62, 0, 0)
    for _ in range(50):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        ticks = read()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        best = min(best, (after - before, ticks, (before + after) // 2))
    return best[1], best[2]
