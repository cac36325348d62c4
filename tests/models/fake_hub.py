"""A local server that plays the Hugging Face Hub's part, with one repository."""

import base64
import hashlib
import json
import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO = "ada/adapter"
COMMIT = "c0ffee" * 6 + "c0ff"


class FakeHub(ThreadingHTTPServer):
    """As much of the Hub's HTTP interface as a push and a fetch need.

    Attributes:
        url: What to name as the Hub's endpoint.
        files: The repository's files by path.
        blobs: What was uploaded as large files, by sha256.
        created: The last request to create the repository.
        requests: Method and route of each request.
        tokens: The Authorization header by route; not asked of the uploads of large files, whose links are signed.
        exists_in_public: Whether the repository was there before, for all to see.
        faults: What happens to the next requests whose method and route match a pattern: a status, or None for a
            connection that breaks in the middle of the answer; each once.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}
        self.requests: list[str] = []
        self.tokens: dict[str, str | None] = {}
        self.exists_in_public = False
        self.faults: list[tuple[str, int | None]] = []

    def pop_fault(self, request: str) -> tuple[str, int | None] | None:
        """What is to happen to a request, as in `faults`; None for nothing."""
        for fault in self.faults:
            pattern, _ = fault
            if re.search(pattern, request):
                self.faults.remove(fault)
                return fault
        return None

    def api(self, route: str, body: bytes) -> Any:
        """The JSON answer to an API route; None is 404."""
        if route == "/api/repos/create":
            self.created = json.loads(body)
            return {"url": f"{self.url}/{REPO}"}
        if route == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if route.startswith(f"/api/models/{REPO}/preupload/"):
            return {"files": [_upload_mode(file["path"]) for file in json.loads(body)["files"]]}
        if route == f"/{REPO}.git/info/lfs/objects/batch":
            return {"transfer": "basic", "objects": [self._lfs_action(file) for file in json.loads(body)["objects"]]}
        if route.startswith(f"/api/models/{REPO}/branch/"):
            return {}
        if route.startswith(f"/api/models/{REPO}/commit/"):
            self._commit([json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{self.url}/{REPO}/commit/{COMMIT}", "commitOid": COMMIT}
        if route.startswith(f"/api/models/{REPO}/tree/"):
            return [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
        exists = bool(self.created or self.files or self.exists_in_public)
        if re.fullmatch(rf"/api/models/{REPO}(/revision/.*)?", route) and exists:
            private = self.created.get("visibility") == "private" and not self.exists_in_public
            return {"id": REPO, "sha": COMMIT, "private": private, "siblings": []}
        return None

    def _lfs_action(self, file: dict[str, Any]) -> dict[str, Any]:
        return {**file, "actions": {"upload": {"href": f"{self.url}/lfs/{file['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]


def _upload_mode(name: str) -> dict[str, Any]:
    """How a file is to be uploaded."""
    mode = "lfs" if name.endswith((".safetensors", ".png")) else "regular"
    return {"path": name, "uploadMode": mode, "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def _read_body(self) -> bytes:
        if length := self.headers.get("Content-Length"):
            return self.rfile.read(int(length))
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        route = self.path.partition("?")[0]
        body = self._read_body()
        request = f"{self.command} {route}"
        self.server.requests.append(request)
        if fault := self.server.pop_fault(request):
            _, status = fault
            return self._fail(status)
        if route.startswith("/lfs/"):
            self.server.blobs[route.removeprefix("/lfs/")] = body
            return self._answer(200, b"")
        self.server.tokens[route] = self.headers.get("Authorization")
        if route.startswith(f"/{REPO}/resolve/"):
            data = self.server.files[route.split("/", 5)[5]]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self._answer(200, data, ETag=etag, X_Repo_Commit=COMMIT)
        answer = self.server.api(route, body)
        if answer is None:
            return self._answer(404, b"{}", X_Error_Code="RepoNotFound")
        return self._answer(200, json.dumps(answer).encode(), Content_Type="application/json")

    def _fail(self, status: int | None) -> None:
        if status is not None:
            error = {"error": f"fault {status}", "url": f"{self.server.url}/{REPO}"}
            return self._answer(status, json.dumps(error).encode())
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass
