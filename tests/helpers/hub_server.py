"""A small hub on this machine: the requests of huggingface_hub's upload, as its own client makes them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_thisTokenIsSecret"
_ONE_AT_A_TIME = threading.Lock()


@dataclass
class Repo:
    """A repository of models: its files' contents."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Hub:
    """What the server holds, and how often files of which digest were sent.

    Attributes:
        refuse_after: refuse the contents of further large files after so many; None: take all.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # contents by digest
    sent: list[str] = field(default_factory=list)
    refuse_after: int | None = None
    url: str = ""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            held = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    held: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._json(
                {"type": "user", "name": "me", "fullname": "Me", "auth": {}} if self._knows_user() else None, 401
            )
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(\?.*)?", self.path):
            repo = self.held.repos.get(found[1])
            siblings = [{"rfilename": name} for name in repo.files] if repo else []
            self._json(repo and {"id": found[1], "private": repo.private, "siblings": siblings}, 404)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", self.path):
            self._send(self.held.repos[found[1]].files[found[2]])
        else:
            self._json(None, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._knows_user():
            return self._json(None, 401)
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            private = wanted.get("private", wanted.get("visibility") == "private")
            self.held.repos.setdefault(name, Repo(private))
            return self._json({"url": f"{self.held.url}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            return self._json({"files": [_upload_mode(file) for file in files]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return self._json({"transfer": "basic", "objects": [self._place_of(item) for item in objects]})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main(\?.*)?", self.path)
        assert found is not None, self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.held.repos[found[1]].files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.held.repos[found[1]].files[value["path"]] = self.held.stored[value["oid"]]
        return self._json({"success": True, "commitOid": "c0ffee", "commitUrl": f"{self.held.url}/{found[1]}/commit/1"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(body).hexdigest()
        assert self.path == f"/lfs/{digest}"
        with _ONE_AT_A_TIME:
            if self.held.refuse_after is not None and len(self.held.sent) >= self.held.refuse_after:
                return self._json(None, 400)
            self.held.sent.append(digest)
            self.held.stored[digest] = body
        return self._json({})

    def _place_of(self, item: dict[str, Any]) -> dict[str, Any]:
        actions = {"upload": {"href": f"{self.held.url}/lfs/{item['oid']}"}}
        return item if item["oid"] in self.held.stored else {**item, "actions": actions}

    def _knows_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _json(self, value: Any, status_without: int = 404) -> None:
        status = 200 if value is not None else status_without
        self._send(json.dumps(value or {}).encode(), status, {"X-Error-Code": "RepoNotFound"} if status == 404 else {})

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        digest = hashlib.sha256(data).hexdigest()
        standard = {"Content-Length": str(len(data)), "ETag": f'"{digest}"', "X-Repo-Commit": "c0ffee"}
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _upload_mode(file: dict[str, Any]) -> dict[str, Any]:
    is_large = file["path"].endswith((".safetensors", "tokenizer.json"))
    return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
