"""A kubelet's pod-resources API: gRPC's own server on a real Unix socket, its messages written byte by byte.

They are written from the published field numbers, with the fields that are not read too, and not by what reads them.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

METHOD = "/v1.PodResourcesLister/List"


def number(value):
    """A varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def part(field, content):
    """A field of length-delimited kind: text or a message."""
    data = content.encode() if isinstance(content, str) else content
    return number(field << 3 | 2) + number(len(data)) + data


def devices(resource, *ids, numa=1):
    topology = part(3, part(1, number(1 << 3) + number(numa)))
    return part(2, part(1, resource) + b"".join(part(2, one) for one in ids) + topology)


def claim(driver, pool, device):
    """A device of dynamic resource allocation."""
    resource = part(1, part(1, f"{driver}/gpu={device}")) + part(2, driver) + part(3, pool)
    return part(5, part(2, "claim") + part(3, "ml") + part(4, resource + part(4, device)))


def container(name, *given):
    cpus = part(3, number(4) + number(300))  # packed
    memory = part(4, part(1, "hugepages-1Gi") + number(2 << 3) + number(1 << 30))
    return part(3, part(1, name) + b"".join(given) + cpus + memory)


def pod(namespace, name, *containers):
    return part(1, part(1, name) + part(2, namespace) + b"".join(containers))


class Kubelet(grpc.GenericRpcHandler):
    """What answers; ``answer`` is the next ListPodResourcesResponse, or the status code to refuse with."""

    def __init__(self, answer=b""):
        self.answer = answer
        self.n_asked = 0

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.reply) if details.method == METHOD else None

    def reply(self, request, context):
        assert request == b""
        self.n_asked += 1
        if isinstance(self.answer, bytes):
            return self.answer
        context.abort(self.answer, "rejected by rate limit")
        return None


@contextmanager
def run_kubelet(socket, answer=b""):
    kubelet = Kubelet(answer)
    server = grpc.server(ThreadPoolExecutor(1), handlers=(kubelet,))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield kubelet
    finally:
        server.stop(None).wait()
