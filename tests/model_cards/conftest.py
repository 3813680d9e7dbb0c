"""A Hugging Face Hub on this machine: the few endpoints that publishing and downloading need, over real HTTP."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants


TOKENS = {"hf_write": "write", "hf_read": "read"}
LARGE = (".safetensors", ".png")
"""Files that the Hub does not take inside a commit."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Belongs to the user `ada`, who is in the organization `lovelace`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        """The files of each repository."""
        self.large_files: dict[str, bytes] = {}
        """What was uploaded apart from the commits, by its SHA-256."""
        self.private: set[str] = set()
        self.commits: list[str] = []
        """The repository of each commit."""
        self.refused: str | None = None
        """The end of paths that are answered with status 403."""
        self.requests: list[tuple[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def reply(self, status, content=None, head_only=False, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if not head_only:
            self.wfile.write(body)

    def answer(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.refused and path.endswith(hub.refused):
            return self.reply(403, {"error": "out of storage"})
        if "/resolve/" in path:
            return self.download(path)
        if path.startswith("/api/models/") and self.command == "GET":
            repo_id = "/".join(path.split("/")[3:5])
            if path.count("/") > 4:  # a folder in the repository
                return self.reply(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
            if repo_id not in hub.repos:
                return self.reply(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
            return self.reply(200, {"id": repo_id, "sha": COMMIT, "private": repo_id in hub.private, "siblings": []})
        if path == "/api/validate-yaml":
            if "\nlicense: " not in json.loads(body)["content"]:
                return self.reply(400, {"errors": [{"message": "no license"}]})
            return self.reply(200, {"errors": [], "warnings": []})
        if path.startswith("/large-files/"):  # an address that the answer to `objects/batch` made
            hub.large_files[path.split("/")[-1]] = body
            return self.reply(200)
        if TOKENS.get(token) is None:
            return self.reply(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            auth = {"accessToken": {"role": TOKENS[token]}}
            return self.reply(200, {"name": "ada", "orgs": [{"name": "lovelace"}], "auth": auth})
        if path in ("/api/repos/create", "/api/repos/delete"):
            values = json.loads(body)
            repo_id = f"{values.get('organization') or 'ada'}/{values['name']}"
            if path.endswith("delete"):
                del hub.repos[repo_id]
                return self.reply(200)
            if repo_id in hub.repos:
                return self.reply(409, {"error": "taken", "url": f"{hub.url}/{repo_id}"})
            hub.repos[repo_id] = {}
            if values.get("visibility") == "private":
                hub.private.add(repo_id)
            return self.reply(200, {"url": f"{hub.url}/{repo_id}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**file, "actions": {"upload": {"href": f"{hub.url}/large-files/{file['oid']}"}}}
                for file in json.loads(body)["objects"]
            ]
            return self.reply(200, {"transfer": "basic", "objects": objects})
        repo_id = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.reply(200, {"files": files})
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.repos[repo_id][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    content = hub.large_files[line["value"]["oid"]]
                    assert hashlib.sha256(content).hexdigest() == line["value"]["oid"]
                    hub.repos[repo_id][line["value"]["path"]] = content
            hub.commits.append(repo_id)
            url = f"{hub.url}/{repo_id}/commit/{COMMIT}"
            return self.reply(200, {"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        return self.reply(404, {"error": "not found"})

    def download(self, path):
        user, name, _, _, file = path[1:].split("/", 4)
        content = self.server.repos.get(f"{user}/{name}", {}).get(file)
        head_only = self.command == "HEAD"
        if content is None:
            return self.reply(404, head_only=head_only, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.reply(200, content, head_only, ETag=etag, X_Repo_Commit=COMMIT)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer


@pytest.fixture(scope="module")
def hub():
    """The Hub of this process and of those that get its `url` as `HF_ENDPOINT`."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(
            constants, "HF_HUB_DISABLE_XET", True
        )  # large files go by Git LFS's protocol, which is plain HTTP
        patch.setattr("transformers.utils.hub._hf_api", None)  # an earlier test may have made it, for the real Hub
        patch.setenv("HF_TOKEN", "hf_write")
        yield server
    server.shutdown()
    thread.join()
    server.server_close()
