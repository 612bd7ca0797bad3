"""What a service writes to standard error."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

PROGRAM = """
import logging, sys
import {client}
from ingero.telemetry.log import set_up_logging

set_up_logging("{level}", "console")
assert {client}.get("{url}", trust_env=False).status_code == 204
logging.getLogger("ingero.fleet").info("the request is over")
"""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        """The lines under test are the client's."""


@contextmanager
def serving():
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("level", ["info", "debug"])
@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_a_request_of_ours_is_no_log_line(client, level):
    """httpx2 is the Kubernetes client's."""
    with serving() as url:
        text = PROGRAM.format(client=client, level=level, url=url)
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.endswith(" info    ingero.fleet: the request is over")
