"""The socket beside a served file, over which `ingero-echo backup` asks for a copy."""

import socket
import time
from contextlib import closing

import pytest
from tests.echo.db.stores import rows_of

from ingero.echo.db.backup_socket import BackupServer, backup_socket_path
from ingero.echo.db.files import back_up
from ingero.testing.open_files import no_more_files
from ingero.testing.waiting import wait_until


@pytest.fixture
def server(store):
    serving = BackupServer(store)
    serving.open()
    with closing(serving):
        yield serving


def said(caplog):
    return [one.getMessage() for one in caplog.records if "descriptor" in one.getMessage()]


@pytest.mark.usefixtures("server")
def test_a_process_without_a_free_descriptor_takes_backups_again_when_one_is_free(
    store, tmp_path, caplog
):
    store.write(rows_of(3))
    for times in (1, 2):
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing(asking), no_more_files():
            asking.connect(str(backup_socket_path(store.path)))
            asking.shutdown(socket.SHUT_WR)
            assert b"error" in asking.recv(4096)  # it waited, with a descriptor set aside for it
            wait_until(lambda times=times: len(said(caplog)) == times, 30)
            used_s, until = time.process_time(), time.monotonic() + 0.5
            wait_until(lambda until=until: time.monotonic() > until)
            assert time.process_time() - used_s < 0.2  # nor does it keep a processor busy
        _, n_rows = back_up(tmp_path / "echo.db", tmp_path / f"copy-{times}.db")
        assert n_rows == 3
    assert len(said(caplog)) == 2  # once for each time that they are used up


def test_a_server_without_a_free_descriptor_can_be_closed(store, caplog):
    serving = BackupServer(store)
    serving.open()
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(asking), no_more_files():
        asking.connect(str(backup_socket_path(store.path)))
        asking.shutdown(socket.SHUT_WR)
        wait_until(lambda: said(caplog), 30)
        serving.close()
    assert not backup_socket_path(store.path).exists()
