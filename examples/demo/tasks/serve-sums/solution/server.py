"""Sums over HTTP, one thread for each client. http.server would do as well; it takes longer to start."""

import json
import re
import socketserver

NUMBERS = re.compile(r"a=(-?[0-9]+)&b=(-?[0-9]+)")


def answer(target):
    """(status, body) for the target of a GET request."""
    path, _, query = target.partition("?")
    if path == "/health":
        return 200, "ok"
    if path != "/sum":
        return 404, "there is nothing here\n"
    if numbers := NUMBERS.fullmatch(query):
        return 200, json.dumps({"sum": int(numbers[1]) + int(numbers[2])})
    return 400, "two whole numbers, please\n"


class Client(socketserver.StreamRequestHandler):
    timeout = 60

    def handle(self):
        words = self.rfile.readline(65536).decode("latin-1").split()
        while self.rfile.readline(65536).strip():
            pass
        status, body = answer(words[1]) if len(words) == 3 and words[0] == "GET" else (400, "GET, please\n")
        head = f"HTTP/1.0 {status} -\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.wfile.write((head + body).encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("127.0.0.1", 8080), Client).serve_forever()
