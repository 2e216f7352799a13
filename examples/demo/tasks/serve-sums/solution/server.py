import http.server
import json
import re
from urllib.parse import parse_qs, urlsplit


class Sums(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/health":
            self.answer(200, b"ok")
        elif url.path == "/sum":
            query = parse_qs(url.query)
            numbers = [query.get(name, [""])[0] for name in "ab"]
            if all(re.fullmatch("-?[0-9]+", number) for number in numbers):
                self.answer(200, json.dumps({"sum": sum(map(int, numbers))}).encode())
            else:
                self.answer(400, b"two whole numbers, please\n")
        else:
            self.answer(404, b"there is nothing here\n")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Sums).serve_forever()
