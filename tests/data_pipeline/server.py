"""A web server on loopback with the faults of real ones, each a folder of its URLs.

/ok/NAME                  the file; ranges, entity tags
/plain/NAME               the file, whole whatever the range, without its length or tag
/short/NAME               closes half-way through, whatever it promised
/closedelimited/NAME      half the file, and no length by which to notice
/flaky/NAME               breaks off after every 64 KiB; ranges
/norange/NAME             breaks off once at half; knows no ranges
/changing/NAME            breaks off at half, and is another file then
/busy/NAME                503 at the first request
/stall/NAME               sends half, then nothing more
/expired-credentials/NAME 403
/404/NAME                 404
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FLAKY_BYTES = 1 << 16


class Server(ThreadingHTTPServer):
    """Serves a folder's files; counts requests and bytes by path."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.stalled = threading.Event()
        self.closing = threading.Event()

    def handle_error(self, *args: object) -> None:
        """Say nothing of readers that have gone."""

    def url(self, fault: str, name: str) -> str:
        """Return a file's URL, with credentials that no message may tell."""
        return f"http://user:hunter2@127.0.0.1:{self.server_port}/{fault}/{name}?signature=hunter3"

    def shown(self, fault: str, name: str) -> str:
        """Return what messages may say of it."""
        return f"http://127.0.0.1:{self.server_port}/{fault}/{name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        _, fault, name = path.split("/", 2)
        self.server.requests[path] += 1
        turn = self.server.requests[path]
        if fault == "404" or not (self.server.folder / name).is_file():
            return self.refuse(404)
        if fault == "expired-credentials":
            return self.refuse(403)
        if fault == "busy" and turn == 1:
            return self.refuse(503)
        content = (self.server.folder / name).read_bytes()
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        has_ranges = fault not in ("norange", "plain", "closedelimited")
        if asked and has_ranges:
            start = int(asked[1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if fault in ("plain", "closedelimited"):
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", f'"{turn if fault == "changing" else 1}"')
        self.end_headers()
        half = len(content) // 2
        end = {
            "short": half,
            "closedelimited": half,
            "stall": half,
            "changing": half,
            "norange": half if turn == 1 else len(content),
            "flaky": start + FLAKY_BYTES,
        }.get(fault, len(content))
        part = content[start:end]
        self.server.sent[path] += len(part)
        try:
            self.wfile.write(part)
            self.wfile.flush()
            if fault == "stall":
                self.server.stalled.set()
                self.server.closing.wait(30)
        except OSError:
            pass  # the reader has had enough
        if start + len(part) < len(content):
            self.close_connection = True
        return None

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder until the end of the block."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
