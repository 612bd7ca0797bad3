"""An HTTP server that keeps what it is sent and answers a status."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Receiver:
    """Listens on loopback."""

    def __init__(self):
        self.status, self.got = 200, []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((dict(self.headers), body))
                self.send_response(receiver.status)
                self.send_header("location", "http://127.0.0.1:9/")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
