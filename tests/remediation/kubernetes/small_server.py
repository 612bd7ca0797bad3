"""A small server that keeps the rules of Kubernetes' API for nodes that the remediator depends on.

It stands in where no real API server is (`scripts/install_kubernetes` builds one); the tests that run against it are the
same ones, so a rule that is kept wrongly here fails there.
"""

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.remediation.kubernetes.small_devices import GROUP, SmallDevices

ADMIN = "admin-token"
NODES = "/api/v1/nodes"
EFFECTS = {"NoSchedule", "NoExecute", "PreferNoSchedule"}


class RefusalError(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.body = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message,
        }  # fmt: skip


def merge(base, patch):
    """A JSON merge patch. Source: RFC 7396."""
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict):
            base[key] = merge(dict(base.get(key) or {}), value)
        else:
            base[key] = value
    return base


def merge_conditions(status, patch):
    """A strategic merge patch of conditions, whose key is their type."""
    by_type = {one["type"]: one for one in status.get("conditions", [])}
    for one in patch.get("conditions", []):
        by_type[one["type"]] = {**by_type.get(one["type"], {}), **one}
    return status | {"conditions": list(by_type.values())}


def note_cordon(before, after, manager):
    """Who changes a field owns it. Source: "Server-Side Apply", field management."""
    was, now = (one.get("spec", {}).get("unschedulable") for one in (before, after))
    if was == now:
        return
    owner = {
        "manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:unschedulable": {}}},
    }  # fmt: skip
    after["metadata"]["managedFields"] = [] if now is None else [owner]


def refuse(code, reason, message):
    raise RefusalError(code, reason, message)


class SmallServer:
    """Nodes, devices, and who may do what.

    Attributes:
        url: Where it listens.
        rights: By bearer, the verbs on resources that it has; None for all.
        devices: Device taints.
    """

    def __init__(self):
        self.nodes = {}
        self.version = 1
        self.rights = {ADMIN: None}
        self.lock = threading.Lock()
        self.devices = SmallDevices(refuse)

    def create(self, node):
        with self.lock:
            self._store(copy.deepcopy(node))

    def delete(self, name):
        with self.lock:
            del self.nodes[name]

    def _store(self, node):
        self.version += 1
        node["metadata"]["resourceVersion"] = str(self.version)
        self.nodes[node["metadata"]["name"]] = node

    def _check(self, bearer, verb, resource):
        if bearer not in self.rights:
            raise RefusalError(401, "Unauthorized", "Unauthorized")
        rights = self.rights[bearer]
        if rights is not None and (verb, resource) not in rights:
            what = f'cannot {verb} resource "{resource}" in API group "" at the cluster scope'
            raise RefusalError(403, "Forbidden", f'{resource} is forbidden: User "x" {what}')

    def _find(self, name):
        if name not in self.nodes:
            raise RefusalError(404, "NotFound", f'nodes "{name}" not found')
        return self.nodes[name]

    def answer(self, method, path, query, bearer, body):
        if path.startswith(GROUP):
            with self.lock:
                return self.devices.answer(
                    method, path, query, lambda *what: self._check(bearer, *what), body
                )
        name, _, part = path.removeprefix(NODES).strip("/").partition("/")
        resource = "nodes/status" if part else "nodes"
        with self.lock:
            if method == "PATCH":
                self._check(bearer, "patch", resource)
                return self._patch(self._find(name), body, query, is_status=bool(part))
            self._check(bearer, "get" if name else "list", resource)
            return self._find(name) if name else self._list(query)

    def _list(self, query):
        wanted = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        found = [
            node
            for _, node in sorted(self.nodes.items())
            if wanted.items() <= node["metadata"].get("labels", {}).items()
        ]
        begin, size = int(query.get("continue", 0)), int(query.get("limit", len(found) or 1))
        meta = {"resourceVersion": str(self.version)}
        if begin + size < len(found):
            meta["continue"] = str(begin + size)
        return {
            "kind": "NodeList", "apiVersion": "v1", "metadata": meta,
            "items": found[begin : begin + size],
        }  # fmt: skip

    def _patch(self, node, patch, query, *, is_status):
        given = patch.get("metadata", {}).get("resourceVersion")
        if given is not None and given != node["metadata"]["resourceVersion"]:
            name = node["metadata"]["name"]
            raise RefusalError(409, "Conflict", f'Operation cannot be fulfilled on nodes "{name}"')
        changed = copy.deepcopy(node)
        if is_status:
            changed["status"] = merge_conditions(changed.get("status", {}), patch["status"])
        else:
            merge(changed, {key: value for key, value in patch.items() if key != "status"})
            note_cordon(node, changed, query.get("fieldManager", "kubectl"))
        for taint in changed.get("spec", {}).get("taints") or ():
            if taint["effect"] not in EFFECTS:
                raise RefusalError(422, "Invalid", f"spec.taints[0].effect: Unsupported {taint}")
        if query.get("dryRun") != "All":
            self._store(changed)
        return changed


@contextmanager
def run_small_server():
    """One of its own port, on loopback."""
    server = SmallServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self):
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            try:
                code, said = 200, server.answer(self.command, parts.path, query, bearer, body)
            except RefusalError as refusal:
                code, said = refusal.body["code"], refusal.body
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_POST = do_DELETE = _handle  # noqa: N815 - the names of the standard library

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
