"""Clients of other makes at the OTLP/gRPC server: they agree with it on HTTP/2, or its frames are wrong."""

import asyncio
import shutil
import subprocess

import grpc
import grpc.aio
import pytest
from tests.serving.otlp.grpc_site import serve
from tests.serving.otlp.http2 import METRICS, message

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer
from ingero.serving.otlp.handler import AnswerHeaders

BODY = bytes(range(256)) * 4096


async def run(*command):
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode(errors="replace")


def test_grpcios_asyncio_client_sends_large_messages_and_many_at_once():
    async def scenario(site):
        site.handler.headers = AnswerHeaders(b"", (("ingero-threshold", "0.9"),))
        async with grpc.aio.insecure_channel(str(site.server.bound)) as channel:
            export = channel.unary_unary(METRICS)
            calls = [export(BODY) for _ in range(20)]
            assert await asyncio.gather(*calls) == [b""] * 20
            assert ("ingero-threshold", "0.9") in tuple(await calls[0].initial_metadata())
            assert ("ingero-threshold", "0.9") in tuple(await calls[0].trailing_metadata())
            assert site.handler.taken == [BODY] * 20
            site.handler.answer = OtlpAnswer(AnswerStatus.UNAVAILABLE, "sp\u00e4ter\n100 %", 3)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await export(b"x")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details() == "sp\u00e4ter\n100 %"
            assert "grpc-status-details-bin" in dict(refused.value.trailing_metadata())
            site.handler.is_slow = True
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await export(b"x", timeout=0.2)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            waiting = export(b"x")
            await asyncio.sleep(0.1)
            waiting.cancel()
            site.handler.go.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    serve(scenario)


def test_grpcio_is_moved_to_another_connection_without_a_lost_call():
    async def scenario(site):
        async with grpc.aio.insecure_channel(str(site.server.bound)) as channel:
            export = channel.unary_unary(METRICS)
            until = asyncio.get_running_loop().time() + 1.5
            n_calls = 0
            while asyncio.get_running_loop().time() < until:
                await asyncio.gather(*(export(b"x", wait_for_ready=True) for _ in range(10)))
                n_calls += 10
        assert len(site.handler.taken) == n_calls
        assert len(site.server._shared.admission._by_peer) <= 1

    serve(scenario, age_ns=0.1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_with_prior_knowledge(tmp_path):
    (tmp_path / "body").write_bytes(message(BODY))

    async def scenario(site):
        url = f"http://{site.server.bound}{METRICS}"
        common = ("curl", "-sS", "-o", tmp_path / "out", "-D", "-", "--http2-prior-knowledge")
        said = await run(*common, "-H", "content-type: application/grpc", "-H", "te: trailers",
                         "--data-binary", f"@{tmp_path / 'body'}", url)  # fmt: skip
        assert said.startswith("HTTP/2 200")
        assert "grpc-status: 0" in said
        assert (tmp_path / "out").read_bytes() == message(b"")
        assert site.handler.taken == [BODY]
        assert (await run(*common, url)).startswith("HTTP/2 405")
        assert (await run(*common, "-X", "POST", url)).startswith("HTTP/2 415")

    serve(scenario)


@pytest.mark.skipif(
    shutil.which("nghttp") is None, reason="no nghttp (apt-get install nghttp2-client)"
)
def test_nghttp_finds_no_error_with_small_windows_and_a_small_table(tmp_path):
    (tmp_path / "body").write_bytes(message(b"abc"))

    async def scenario(site):
        site.handler.answer = OtlpAnswer(AnswerStatus.TAKEN, "x" * 3000, n_rejected=1)
        url = f"http://{site.server.bound}{METRICS}"
        said = await run(
            "nghttp", "-nv", "-w8", "-W9", "--header-table-size=0", "-m20", "-b7",
            "-H", ":method: POST", "-H", "content-type: application/grpc", "-H", "te: trailers",
            "-d", tmp_path / "body", url,
        )  # fmt: skip
        assert said.count("grpc-status: 0") == 20
        assert "error_code=NO_ERROR" in said  # its own GOAWAY
        assert said.count("error_code=") == 1
        assert site.handler.taken == [b"abc"] * 20

    serve(scenario)
