"""A stand-in for the Hugging Face hub: one HTTP server on the loopback interface that keeps repositories in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_of_this_test"


class Hub(ThreadingHTTPServer):
    """The server: ``repos`` holds files by repository, ``commits`` the names that each commit added and deleted."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[tuple[str, set[str], set[str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@contextmanager
def using_hub(url: str) -> Iterator[None]:
    """Let ``huggingface_hub`` in this process use the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "no such token"}, 401)
        elif path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'somebody'}/{given['name']}"
            self.server.repos.setdefault(name, {})
            self._answer({"url": f"{self.server.url}/{name}"})
        elif "/preupload/" in path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        else:
            name = path.removeprefix("/api/models/").split("/commit/")[0]
            self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, lines: list[Any]) -> None:
        files = self.server.repos[name]
        added = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
        deleted = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        for path in deleted:
            del files[path]
        files.update({path: base64.b64decode(content) for path, content in added.items()})
        self.server.commits.append((name, set(added), deleted))
        self._answer({"commitUrl": f"{self.server.url}/{name}/commit/{_sha(files)}", "commitOid": _sha(files)})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        files = self.server.repos.get(name)
        if files is None:
            self._answer({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": each, "size": len(data), "oid": _sha({each: data})}
                for each, data in files.items()
            ]
            self._answer(entries)
        elif "/revision/" in path:
            self._answer({"id": name, "sha": _sha(files), "siblings": [{"rfilename": each} for each in files]})
        else:
            data = files.get(path.split("/", 5)[5])
            if data is None:
                self._answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
            else:
                self._answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=_sha(files))

    do_HEAD = do_GET  # noqa: N815  the name that the library calls


def _sha(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
