import asyncio
import socket

from ingero.config import Endpoint
from ingero.serving.asgi import bind


def test_answers_do_not_wait_for_the_clients_acknowledgement():
    """asyncio sets TCP_NODELAY on accepted sockets only when the listening one names its protocol."""

    async def accept():
        accepted = asyncio.get_running_loop().create_future()
        listening = await bind(Endpoint("127.0.0.1", 0))

        def connected(reader, writer):
            link = writer.get_extra_info("socket")
            accepted.set_result(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        server = await asyncio.start_server(connected, sock=listening)
        _, writer = await asyncio.open_connection(*listening.getsockname())
        found = await accepted
        writer.close()
        server.close()
        return found

    assert asyncio.run(accept())
