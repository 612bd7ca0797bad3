"""ClickHouse's HTTP interface over its engine in this process: what the production client speaks, with one user.

Enough of it for our client: a statement or rows in the body, values and settings in the query, errors as status 500
with the code in a header. Source: ClickHouse's documentation, "HTTP interface".
"""

import base64
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

USER, PASSWORD = "echo", "a pass word"
_OURS = {"query", "database", "session_id", "compress", "wait_end_of_query", "query_id"}
_INSERT = re.compile(r"INSERT INTO\s+(\S+)\s+(?:\((.*)\)\s+)?FORMAT\s+(\w+)", re.DOTALL)
_FORMAT = re.compile(r"\s+FORMAT\s+(\w+)\s*$")


KILL = "KILL QUERY WHERE query_id = {id:String}"
_KILL_BY_TEXT = "KILL QUERY WHERE query LIKE concat('/* ', {id:String}, ' */%') AND query NOT LIKE '%KILL QUERY%'"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}


def _unescape(text):
    """A value as TabSeparated writes it."""
    if text == r"\N":
        return None
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text, flags=re.DOTALL)


class PlannedError(Exception):
    """What a test asked for."""

    code = 999

    def __str__(self):
        return "Code: 999. DB::Exception: planned"


class ClickHouseServer:
    """Serves until closed.

    Attributes:
        fail_inserts: So many inserts are refused.
        is_done_first: A refused insert was done all the same.
        settings: Of the last statement.
        killed: Ids of the statements that were to be ended.
    """

    def __init__(self, connect, refusal):
        self.connect = connect
        self.refusals = (refusal, PlannedError)
        self.engines = {}
        self.fail_inserts = 0
        self.is_done_first = False
        self.settings = {}
        self.killed = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, code, answer = outer.answer(self, body)
                self.send_response(status)
                if code:
                    self.send_header("X-ClickHouse-Exception-Code", str(code))
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"clickhouse://{USER}@127.0.0.1:{self.port}/default"

    def answer(self, request, body):
        wanted = b"Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode())
        if (request.headers.get("authorization") or "").encode() != wanted:
            return (
                403,
                516,
                b"Code: 516. DB::Exception: Authentication failed (AUTHENTICATION_FAILED)",
            )
        if request.headers.get("transfer-encoding") == "chunked":
            body = self.read_chunks(request.rfile)
        asked = dict(parse_qsl(urlsplit(request.path).query, keep_blank_values=True))
        values = {
            name[6:]: _unescape(value) for name, value in asked.items() if name.startswith("param_")
        }
        self.settings = {
            name: value
            for name, value in asked.items()
            if name not in _OURS and not name.startswith("param_")
        }
        database = asked.get("database", "default")
        try:
            # One connection of the engine in the process runs one statement at a time, which this is to end.
            engine = self.find_engine(database, for_kills=KILL.encode() in body)
            return 200, 0, self.run(engine, asked, body, values, request.headers)
        except self.refusals as error:
            return 500, error.code or 1, str(error).encode()

    def find_engine(self, database, *, for_kills=False):
        key = (database, for_kills)
        if key not in self.engines:
            self.engines[key] = self.connect(interface="chdb", database=database)
        return self.engines[key]

    def run(self, engine, asked, body, values, headers):
        query = asked.get("query")
        insert = _INSERT.search(query or "")
        if insert is not None:
            return self.insert(engine, insert, body, headers.get("content-encoding"))
        text = query or body.decode()
        if text.startswith(KILL):  # the engine in the process gives its statements other ids
            self.killed.append(values["id"])
            text = text.replace(KILL, _KILL_BY_TEXT)
        elif "query_id" in asked:
            text = f"/* {asked['query_id']} */ {text}"
        form = _FORMAT.search(text)
        # A server forgets this one after its statement, the engine in the process keeps it.
        settings = {name: value for name, value in self.settings.items() if name != "readonly"}
        return engine.raw_query(
            text[: form.start()] if form else text,
            parameters=values,
            settings=settings,
            fmt=form[1] if form else "TabSeparated",
        )

    def insert(self, engine, insert, body, encoding):
        fails, self.fail_inserts = self.fail_inserts > 0, max(0, self.fail_inserts - 1)
        if not fails or self.is_done_first:
            columns = [name.strip(" `") for name in (insert[2] or "").split(",") if name.strip()]
            engine.raw_insert(insert[1], columns or None, body, fmt=insert[3], compression=encoding)
        if fails:
            raise PlannedError
        return b""

    @staticmethod
    def read_chunks(file):
        parts = []
        while size := int(file.readline().partition(b";")[0], 16):
            parts.append(file.read(size))
            file.readline()
        file.readline()
        return b"".join(parts)

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        for engine in self.engines.values():
            engine.close()
