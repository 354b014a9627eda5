"""A stand-in for the Hugging Face hub on the loopback interface, for tests of the downloads.

It serves /datasets/<repo>/resolve/<revision>/<file> and the tree listing of /api/datasets/<repo>, as far as the client
huggingface_hub 2 asks for them, and plays the tricks that a test plans.
"""
import hashlib
import http.server
import json
import os
import socket
import threading
import urllib.parse

COMMIT = "c0ffee" * 6 + "c0ff"


class Hub:
    """Serves `files` {name: bytes} of the dataset repository `repo`.

    plan[file] (for GET) and head_plan[file] (for HEAD) list tricks, one per request; after them it behaves.
    """

    def __init__(self, repo, files):
        self.repo, self.files, self.plan, self.head_plan, self.log = repo, dict(files), {}, {}, []
        self.retry_after = "1"
        self.stuck, self.elsewhere, self.tokens_elsewhere = threading.Event(), False, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                outer.answer(self, False)

            def do_GET(self):
                outer.answer(self, True)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.stuck.set()
        self.server.shutdown()
        self.server.server_close()

    def gets(self, name):
        return [entry for entry in self.log if entry[0] == "GET" and entry[1] == name]

    @staticmethod
    def reply(handler, status, headers=(), body=b""):
        handler.send_response(status)
        for key, value in headers:
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    def answer(self, handler, get):
        parts = urllib.parse.unquote(handler.path.partition("?")[0]).split("/")
        name = parts[-1]
        if parts[1:6] == ["api", "datasets", *self.repo.split("/"), "tree"]:
            folder = "/".join(parts[7:])
            listing = [{"type": "file", "path": f"{folder}/{name}", "size": len(data), "oid": "0" * 40}
                       for name, data in self.files.items()]
            return self.reply(handler, 200, [("Content-Type", "application/json")], json.dumps(listing).encode())
        if parts[1] == "storage":
            self.tokens_elsewhere.append(handler.headers.get("Authorization"))
            return self.send_file(handler, get, name)
        if parts[1:4] != ["datasets", *self.repo.split("/")] or parts[4] != "resolve":
            return self.reply(handler, 404)
        self.log.append((handler.command, name, handler.headers.get("Range")))
        if name not in self.files:
            return self.reply(handler, 404, [("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", COMMIT)])
        if self.elsewhere:          # as the real hub does: the facts here, the bytes at a storage host
            data = self.files[name]
            return self.reply(handler, 302, [
                ("X-Repo-Commit", COMMIT), ("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"'),
                ("X-Linked-Size", str(len(data))), ("Location", f"http://localhost:{self.port}/storage/{name}")])
        return self.send_file(handler, get, name)

    def send_file(self, handler, get, name):
        data = self.files[name]
        plan = (self.plan if get else self.head_plan).get(name, [])
        trick = plan.pop(0) if plan else "serve"
        if trick == "429":
            return self.reply(handler, 429, [("Retry-After", self.retry_after)])
        if trick == "503":
            return self.reply(handler, 503)
        etag = hashlib.sha256(data).hexdigest()
        headers = [("X-Repo-Commit", COMMIT), ("Accept-Ranges", "bytes")]
        headers += [("ETag", f'"{etag}"'), ("X-Linked-Etag", f'"{etag}"'), ("X-Linked-Size", str(len(data)))]
        if trick == "lie":
            data = data[:5000] + bytes(100) + data[5100:]
        if trick == "short":
            data = data[:1_000_000]
        status, start = 200, 0
        if get and (asked := handler.headers.get("Range")) and trick != "no-range":
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            status = 206
            headers.append(("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"))
        body = data[start:]
        handler.send_response(status)
        for key, value in headers:
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if not get:
            return None
        if trick == "cut":
            handler.wfile.write(body[:len(body) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif trick == "hang":
            handler.wfile.write(body[:len(body) // 2])
            handler.wfile.flush()
            self.stuck.wait(60)
            handler.close_connection = True
        else:
            handler.wfile.write(body)
        return None


def environment(tmp_path, url, **more):
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env.update(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1", **more)
    return env
