"""A real API server of Kubernetes with a real etcd, as `scripts/install_kubernetes` builds them."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.remediation.kubernetes.small_server import ADMIN
from tests.support import local_http

from ingero.sim.cluster.ports import find_free_ports
from ingero.testing.waiting import wait_until

FOLDER = Path(__file__).parents[3] / ".cache/kubernetes"
PROGRAMS = FOLDER / "kube-apiserver", FOLDER / "etcd"
REMEDIATOR = "remediator-token"
READER = "reader-token"
TOKENS = f'{ADMIN},admin,1,"system:masters"\n{REMEDIATOR},remediator,2\n{READER},reader,3\n'


class RealServer:
    """A server that answers.

    Args:
        url: Where it listens.
        authority: PEM of what signed its certificate.
    """

    def __init__(self, url, authority):
        self.url = url
        self.authority = authority
        self.client = local_http.open_client(
            base_url=url, verify=False, headers={"Authorization": f"Bearer {ADMIN}"}
        )

    def post(self, path, obj):
        answer = self.client.post(path, json=obj)
        assert answer.status_code in {201, 409}, answer.text
        return answer

    def create(self, node):
        """A node with its status, which is a resource of its own, as the node controller leaves one that is ready."""
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        self.post("/api/v1/nodes", node)
        self.patch(f"{path}/status", {"status": node["status"]})
        # The server taints each new node as not ready; the controller, which does not run, takes that away.
        self.patch(path, {"spec": {"taints": node["spec"].get("taints") or None}})

    def patch(self, path, change):
        """A strategic merge patch of a status, a merge patch of the rest."""
        kind = "strategic-merge" if path.endswith("/status") else "merge"
        answer = self.client.patch(
            path, json=change, headers={"Content-Type": f"application/{kind}-patch+json"}
        )
        assert answer.status_code == 200, answer.text

    def delete(self, name):
        assert self.client.delete(f"/api/v1/nodes/{name}").status_code == 200

    def clear(self):
        assert self.client.delete("/api/v1/nodes").status_code == 200


@contextmanager
def run_real_server(folder):
    """An API server on an empty etcd."""
    etcd_port, peer_port, port = find_free_ports(3)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "accounts.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    (folder / "tokens.csv").write_text(TOKENS)
    peer = f"http://127.0.0.1:{peer_port}"
    etcd = [
        FOLDER / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync",
        "--listen-client-urls", f"http://127.0.0.1:{etcd_port}",
        "--advertise-client-urls", f"http://127.0.0.1:{etcd_port}",
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    server = [
        FOLDER / "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{etcd_port}",
        "--cert-dir", folder / "certificates", "--secure-port", str(port),
        "--bind-address", "127.0.0.1", "--service-cluster-ip-range", "10.0.0.0/24",
        "--authorization-mode", "RBAC", "--token-auth-file", folder / "tokens.csv",
        "--service-account-issuer", "https://example", "--disable-admission-plugins", "ServiceAccount",
        "--service-account-key-file", folder / "accounts.pem",
        "--service-account-signing-key-file", folder / "accounts.pem",
    ]  # fmt: skip
    with (
        (folder / "etcd.log").open("wb") as etcd_log,
        (folder / "server.log").open("wb") as server_log,
        ended(subprocess.Popen(etcd, stdout=etcd_log, stderr=etcd_log)),
        ended(subprocess.Popen(server, stdout=server_log, stderr=server_log)) as process,
    ):
        url = f"https://127.0.0.1:{port}"

        def is_ready():
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            try:
                return local_http.get(f"{url}/readyz", verify=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready)
        real = RealServer(url, folder / "certificates/apiserver.crt")
        with real.client:
            yield real


@contextmanager
def ended(process):
    """A process that is ended with the context."""
    try:
        with process:
            yield process
            process.terminate()
    finally:
        process.kill()
