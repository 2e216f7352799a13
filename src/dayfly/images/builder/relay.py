"""Runs in a builder VM, with what Debian's python3-minimal has (no `queue`): the way out for RUN.

Programs connect to 127.0.0.1:3128 as to an HTTP proxy. The host keeps some connections to port 3129 waiting, over
its channel to the guest; each program's connection is tied to one of them, and the host does the rest.
"""

import contextlib
import socket
import threading

PROGRAMS, HOST = 3128, 3129
MOST = 64
"""Connections at a time; further ones wait."""
WAIT_S = 60.0

waiting: "list[socket.socket]" = []
changed = threading.Condition()
room = threading.Semaphore(MOST)


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(128)
    return server


def accept_host(server: socket.socket) -> None:
    while True:
        connection = server.accept()[0]
        with changed:
            waiting.append(connection)
            changed.notify()


def take() -> "socket.socket | None":
    with changed:
        return waiting.pop(0) if changed.wait_for(lambda: waiting, WAIT_S) else None


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def tie(program: socket.socket) -> None:
    try:
        with program:
            host = take()
            if host is not None:
                with host:
                    back = threading.Thread(target=pump, args=(host, program), daemon=True)
                    back.start()
                    pump(program, host)
                    back.join()
    finally:
        room.release()


def main() -> None:
    programs, host = listen(PROGRAMS), listen(HOST)
    threading.Thread(target=accept_host, args=(host,), daemon=True).start()
    print("ready", flush=True)
    while True:
        room.acquire()
        connection = programs.accept()[0]
        threading.Thread(target=tie, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
