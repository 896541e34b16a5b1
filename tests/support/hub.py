"""A model hub on loopback: the few requests that a download makes, answered from a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves one repository.

    Attributes:
        endpoint: For HF_ENDPOINT.
        fetched: Files that were asked for with GET, in order.
    """

    def __init__(self, name: str, folder: Path) -> None:
        hub = self
        self.fetched: list[str] = []
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith(f"/api/models/{name}/tree/"):
                    entries = [
                        {
                            "type": "file",
                            "path": file,
                            "size": (folder / file).stat().st_size,
                            "oid": _sha1(folder / file),
                        }
                        for file in files
                    ]
                    self._answer(json.dumps(entries).encode())
                elif path.startswith(f"/api/models/{name}"):
                    siblings = [{"rfilename": file} for file in files]
                    self._answer(json.dumps({"id": name, "sha": REVISION, "siblings": siblings}).encode())
                elif path.startswith(f"/{name}/resolve/"):
                    file = path.split("/", 5)[5]
                    if self.command == "GET":
                        hub.fetched.append(file)
                    self._answer((folder / file).read_bytes(), etag=_sha1(folder / file))
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def _answer(self, body: bytes, etag: str = "") -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Repo-Commit", REVISION)
                if etag:
                    self.send_header("ETag", f'"{etag}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
