"""The one server runner: binds what it says, drains, and names what it cannot bind."""

import asyncio
import socket

import pytest
from tests.support import local_http

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.serving.asgi import AsgiServer, AsgiSettings


async def _answer(send, body):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def _hello(scope, receive, send):
    await _answer(send, scope["path"].encode())


def test_port_zero_is_bound_and_readable_and_answers_with_a_date():
    async def scenario():
        server = AsgiServer(_hello, Endpoint("127.0.0.1", 0))
        await server.start()
        assert server.bound.port > 0
        async with local_http.open_async_client() as client:
            answer = await client.get(f"http://{server.bound}/x")
        await server.stop()
        return answer

    answer = asyncio.run(scenario())
    assert answer.content == b"/x"
    assert "date" in answer.headers
    assert "server" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", ""])
def test_names_and_empty_hosts_are_reachable_over_ipv4(host):
    async def scenario():
        server = AsgiServer(_hello, Endpoint(host, 0))
        await server.start()
        async with local_http.open_async_client() as client:
            answer = await client.get(f"http://127.0.0.1:{server.bound.port}/")
        await server.stop()
        return answer.status_code

    assert asyncio.run(scenario()) == 200


def test_request_in_flight_finishes_during_stop_and_new_ones_are_refused():
    async def scenario():
        entered, release = asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            entered.set()
            await release.wait()
            await _answer(send, b"done")

        server = AsgiServer(slow, Endpoint("127.0.0.1", 0))
        await server.start()
        where = server.bound
        async with local_http.open_async_client() as client:
            request = asyncio.create_task(client.get(f"http://{where}/"))
            await entered.wait()
            stopping = asyncio.create_task(server.stop())
            while True:  # until the socket is closed; bounded by the test's timeout
                try:
                    _, writer = await asyncio.open_connection(where.host, where.port)
                except ConnectionError:
                    break
                writer.close()
            release.set()
            answer = await request
            await stopping
        return answer.content

    assert asyncio.run(scenario()) == b"done"


def test_request_that_outlives_the_drain_is_cancelled():
    async def scenario():
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def stuck(scope, receive, send):
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        server = AsgiServer(stuck, Endpoint("127.0.0.1", 0), settings=AsgiSettings(drain_s=0))
        await server.start()
        async with local_http.open_async_client() as client:
            request = asyncio.create_task(client.get(f"http://{server.bound}/"))
            await entered.wait()
            await server.stop()
            await cancelled.wait()
            request.cancel()
        return True

    assert asyncio.run(scenario())


def test_port_in_use_names_the_address_and_the_next_step():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(IngeroError) as caught:
                await AsgiServer(_hello, Endpoint("127.0.0.1", port)).start()
        return port, caught.value

    port, error = asyncio.run(scenario())
    assert f"127.0.0.1:{port}" in error.message
    assert "in use" in error.message
    assert str(port) in error.hint


def test_stop_twice_and_stop_before_start_do_nothing():
    async def scenario():
        server = AsgiServer(_hello, Endpoint("127.0.0.1", 0))
        await server.stop()
        await server.start()
        await server.stop()
        await server.stop()

    asyncio.run(scenario())
