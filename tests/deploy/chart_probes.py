"""Probes of the charts' containers, asked as a kubelet does."""

import httpx
from tests.support import local_http

from ingero.testing.waiting import wait_until


def is_up(url):
    def ask():
        try:
            return local_http.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    return ask


def wait_for(node, name, process, log, kind="startupProbe"):
    """Until the kubelet would be content."""
    url = node.probe(name, kind)

    def ready():
        assert process.poll() is None, log.read_text()
        return is_up(url)()

    wait_until(ready, 60)
