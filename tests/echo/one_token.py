"""`ingero-echo` with one token, in a process of its own."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.echo.service.conftest import gauge, metrics, resource
from tests.support import local_http

from ingero.otlp.names import Signal

ECHO = Path(sys.executable).with_name("ingero-echo")
TOKEN = "t" * 32
ADDRESSES = [
    part
    for flag in ("--otlp-addr", "--otlp-http-addr", "--mcp-addr", "--health-addr")
    for part in (flag, "127.0.0.1:0")
]


class Echo:
    """A served database in a process of its own."""

    def __init__(self, db, token_file, *more, program=(str(ECHO),)):
        command = [*program, "serve", "--insecure-no-tls", "--db", str(db), *ADDRESSES]
        command += ["--auth-token-file", str(token_file), *more]
        self.log = token_file.with_name(f"{db.name}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        ports = re.findall(r"127\.0\.0\.1:(\d+)", line)
        assert len(ports) == 4, self.log.read_text()
        _, self.otlp, self.api, self.health = (int(port) for port in ports)

    def push(self, export, signal=Signal.METRICS, token=TOKEN, timeout=120):
        return local_http.post(
            f"http://127.0.0.1:{self.otlp}/v1/{signal.value}",
            content=export.message.SerializeToString(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/x-protobuf"},
            timeout=timeout,
        )

    def sql(self, text):
        answer = local_http.post(
            f"http://127.0.0.1:{self.api}/api/v2/sql",
            json={"sql": text, "time_window": "99d"},
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["rows"]

    def whoami(self, token):
        headers = {"authorization": f"Bearer {token}"}
        return local_http.get(
            f"http://127.0.0.1:{self.api}/api/v2/whoami", headers=headers
        ).status_code

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        status = self.process.wait(120)
        self.process.stdout.close()
        return status


def run(*args):
    return subprocess.run([str(ECHO), *map(str, args)], capture_output=True, text=True, check=False)


def numbered(start, n):
    """Rows whose value is their number, so that each can be counted."""
    now_ns = time.time_ns()
    points = [gauge("numbered", float(start + i), now_ns + i) for i in range(n)]
    return metrics([(resource("c1", "n1"), points)])


def fill(db, token_file, *batches):
    echo = Echo(db, token_file)
    for batch in batches:
        assert echo.push(batch).status_code == 200
    return echo
