"""Where the kubelet is asked: the environment's socket, else the kubelet's own."""

from pathlib import Path

from ingero.config.environment import (
    DEFAULT_KUBELET_SOCKET,
    KUBELET_SOCKET,
    read_kubelet_socket,
    set_kubelet_socket,
)


def test_the_environment_wins_over_the_default():
    assert read_kubelet_socket({}) == Path(DEFAULT_KUBELET_SOCKET)
    assert read_kubelet_socket({KUBELET_SOCKET: ""}) == Path(DEFAULT_KUBELET_SOCKET)
    assert read_kubelet_socket({KUBELET_SOCKET: "/run/k.sock"}) == Path("/run/k.sock")


def test_what_is_set_holds_from_then_on(monkeypatch):
    monkeypatch.setenv(KUBELET_SOCKET, "/run/before.sock")
    set_kubelet_socket("/run/k.sock")
    assert read_kubelet_socket() == Path("/run/k.sock")
