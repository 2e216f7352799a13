"""The process that ends the VMs of a controller which was killed.

The launchers of a VMM ask the kernel to be killed with their parent, but one whose parent dies before it has
asked is never told, and bubblewrap's child asks late. So each controller has a keeper: a small process in a
session of its own that reads what the controller owns and, when the pipe ends, kills whatever carries an
owner's mark, again and again until no process has appeared for a while.

It is run as a script (`python -I -S keeper.py PREFIX`), so nothing but the standard library is imported here.
Its input is one line an owner: `+ID` when it begins to own VMs, `-ID` when all of them are gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

QUIET_S = 2.0
"""So long no process may have appeared: what was about to start when the controller died has by then."""
AT_MOST_S = 60.0


def processes_of(prefix: str, identity: str) -> dict[int, str]:
    """Processes (not zombies, which have no command line) started for the VMs of an owner: pid → VM id."""
    mark = f"{prefix}:{identity}:".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # as an argument of its own: an editor that shows such a name is not meant
            for argument in (folder / "cmdline").read_bytes().split(b"\x00"):
                if argument.startswith(mark):
                    found[int(folder.name)] = os.fsdecode(argument[len(mark) :])
    return found


def kill_once(prefix: str, identity: str) -> dict[int, str]:
    """SIGKILL to each process of an owner; those that were there."""
    found = processes_of(prefix, identity)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


def main() -> None:
    prefix = sys.argv[1]
    owners: set[str] = set()
    for line in sys.stdin:
        (owners.add if line[0] == "+" else owners.discard)(line[1:].strip())
    started = quiet_since = time.monotonic()
    while owners and (now := time.monotonic()) < min(quiet_since + QUIET_S, started + AT_MOST_S):
        for identity in owners:
            if kill_once(prefix, identity):
                quiet_since = now
        time.sleep(0.02)


if __name__ == "__main__":
    main()
