"""As much of the Hugging Face hub as its own client needs to make a repository, commit to it, and read it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from typing import Any

LARGE = 4096  # bytes from which files go by way of git LFS


class FakeHub(http.server.ThreadingHTTPServer):
    """Repositories in memory. `commits` are the files of each commit; only who has `token` sees or makes any."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.validated: list[str] = []  # README.md that were asked about
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(self.body())

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def send(self, content: bytes | dict[str, Any] | list[Any], status: int = 200, **headers: str) -> None:
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer(self, body: bytes) -> None:
        hub = self.server
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "large":  # where LFS sends them, and reads them from
            if self.command == "PUT":
                hub.large[parts[1]] = body
            return self.send(hub.large[parts[1]] if self.command != "PUT" else b"")
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.send({"error": "Invalid username or password."}, 401, X_Error_Code="RepoNotFound")
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            if name in hub.commits:
                return self.send({"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409)
            hub.commits[name] = []
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(name)
            return self.send({"url": f"{hub.url}/{name}", "name": name, "id": name})
        if parts[:2] == ["api", "validate-yaml"]:
            hub.validated.append(json.loads(body)["content"])
            return self.send({"errors": [], "warnings": []})
        if parts[:2] == ["api", "models"]:
            return self.repository("/".join(parts[2:4]), parts[4:], body)
        name = "/".join(parts[:2]).removesuffix(".git")
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            return self.send(
                {
                    "transfer": "basic",
                    "objects": [
                        {**o, "actions": {"upload": {"href": f"{hub.url}/large/{o['oid']}"}}}
                        for o in json.loads(body)["objects"]
                    ],
                },
                Content_Type="application/vnd.git-lfs+json",
            )
        if parts[2:3] == ["resolve"] and hub.commits.get(name):
            content = hub.commits[name][-1].get("/".join(parts[4:]))
            if content is not None:
                digest = hashlib.sha256(content).hexdigest()
                return self.send(content, ETag=f'"{digest}"', X_Repo_Commit=self.commit(name))
            return self.send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        return self.send({"error": f"no {self.path}"}, 404)

    def repository(self, name: str, what: list[str], body: bytes) -> None:
        hub = self.server
        if name not in hub.commits:
            return self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        files = hub.commits[name][-1] if hub.commits[name] else {}
        if what[:1] == ["preupload"]:
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.send({"files": modes})
        if what[:1] == ["commit"]:
            added = dict(files)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    added[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    added[value["path"]] = hub.large[value["oid"]]
            hub.commits[name].append(added)
            oid = self.commit(name)
            return self.send({"success": True, "commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})
        if what[:1] == ["tree"]:
            return self.send(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in files]
        return self.send(
            {"id": name, "modelId": name, "sha": self.commit(name), "siblings": siblings, "private": True}
        )

    def commit(self, name: str) -> str:
        return hashlib.sha1(f"{name} {len(self.server.commits[name])}".encode()).hexdigest()

    def log_message(self, *_: object) -> None:
        """Quiet."""
