"""A real ``ingero-echo serve`` with several tenants, for tests of its reading side."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from tests.echo.service.conftest import ALL, ONE, TWO
from tests.support import local_http

from ingero.otlp.names import Signal

ECHO = Path(sys.executable).with_name("ingero-echo")
THREE = "three-" + "e" * 26
FLAGS = ("--otlp-addr", "--otlp-http-addr", "--mcp-addr", "--health-addr")
ACL = f"""
- {{key_name: operator, token: {ALL}, allowed_clusters: ["*"]}}
- {{key_name: team-one, token: {ONE}, allowed_clusters: [c1]}}
- {{key_name: team-two, token: {TWO}, allowed_clusters: [c2]}}
- {{key_name: team-three, token: {THREE}, allowed_clusters: [c3], grace: 0s}}
"""


class Served:
    """The program, its ports and its log; a context manager that ends it."""

    def __init__(self, folder, *more, **settings):
        self.acl = folder / "acl.yaml"
        self.acl.touch(mode=0o600)
        self.acl.write_text(ACL)
        self.log = folder / "log"
        command = [str(ECHO), "serve", "--insecure-no-tls", "--db", str(folder / "echo.db"), *more]
        command += ["--bearer-acl-file", str(self.acl), "--log-format", "json"]
        for flag in FLAGS:
            command += [flag, "127.0.0.1:0"]
        for key, value in {"rate_per_second": 1000, "min_free_space": "1MiB", **settings}.items():
            command += ["--set", f"{key}={value}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        ports = re.findall(r"127\.0\.0\.1:(\d+)", line)
        assert len(ports) == 4, self.log.read_text()
        self.otlp_grpc, self.otlp, self.api, self.health = (int(port) for port in ports)
        self.url = f"http://127.0.0.1:{self.api}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(120)
        self.process.stdout.close()
        return status

    def push(self, export, token=ALL, signal=Signal.METRICS):
        return local_http.post(
            f"http://127.0.0.1:{self.otlp}/v1/{signal.value}",
            content=export.message.SerializeToString(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/x-protobuf"},
            timeout=120,
        )

    def post(self, path, content, token=ALL, **headers):
        return local_http.post(
            f"{self.url}{path}",
            content=content,
            headers={
                "authorization": f"Bearer {token}",
                "content-type": "application/json",
                **headers,
            },
            timeout=120,
        )

    def get(self, path, token=ALL, **headers):
        given = {"authorization": f"Bearer {token}"} if token else {}
        return local_http.get(f"{self.url}{path}", headers=given | headers, timeout=120)

    def sql(self, text, token=ALL, **more):
        return self.post("/api/v2/sql", json.dumps({"sql": text, **more}), token)

    def ask(self, tool, args=None, token=ALL):
        return self.post(f"/api/v2/tools/{tool}", json.dumps({"args": args or {}}), token)

    def lines(self):
        # The last one may not be written to its end.
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def audit(self):
        return [line for line in self.lines() if line["logger"] == "ingero.echo.audit"]


class Asking(threading.Thread):
    """Something asked on a thread; ``answer`` is there when it ended."""

    def __init__(self, ask, *args, **more):
        super().__init__()
        self._ask = lambda: ask(*args, **more)
        self.answer = None
        self.start()

    def run(self):
        try:
            self.answer = self._ask()
        except httpx.HTTPError as error:
            self.answer = error
