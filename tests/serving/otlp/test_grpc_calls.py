"""Calls at the OTLP/gRPC server: their messages, encodings, codes and deadlines."""

import pytest
from tests.serving.otlp.grpc_site import (
    WORD,
    serve,
)
from tests.serving.otlp.http2 import (
    DATA,
    HEADERS,
    frame,
    message,
)

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(DATA, 1, 1), 13),
        (frame(DATA, 1, 1, b"\0\0"), 13),
        (frame(DATA, 1, 1, message(b"abc")[:-1]), 13),
        (frame(DATA, 1, 1, message(b"abc") + b"x"), 13),
        (frame(DATA, 1, 1, message(b"abc") * 2), 13),
        (frame(DATA, 1, 1, message(b"abc", flag=1)), 13),
        (frame(DATA, 1, 1, message(b"abc", flag=7)), 13),
        (frame(DATA, 0, 1, b"\0" + WORD((1 << 20) + 1)), 8),
    ],
    ids=["none", "prefix", "short", "long", "two", "no encoding", "bad flag", "too large"],
)
def test_a_message_that_is_none_is_answered_with_its_code(frames, code):
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()), frames)
        assert await client.status(1) == code
        assert "grpc-status-details-bin" not in client.headers[1][-1]
        assert not site.handler.taken
        assert len(site.handler.refusals) == 1
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario, max_message_bytes=1 << 20)


def test_what_is_no_export_is_answered_and_counted():
    async def scenario(site):
        client = await site.connect()
        client.call(1, **{":path": "/a.B/C\u00e9"})
        trailers = await client.trailers(1)
        assert trailers["grpc-status"] == "12"
        assert "MetricsService/Export" in trailers["grpc-message"]
        for stream, head, status in (
            (3, {":method": "GET"}, "405"),
            (5, {"content-type": "text/html"}, "415"),
        ):
            client.send(frame(HEADERS, 5, stream, client.block(**head)))
            await client.until(lambda stream=stream: stream in client.ended)
            assert client.headers[stream] == [{":status": status}]
        assert site.handler.refusals == [Reason.PATH, Reason.METHOD, Reason.CONTENT_TYPE]

    serve(scenario)


def test_an_unknown_encoding_is_unimplemented_and_told_what_is_known():
    async def scenario(site):
        client = await site.connect()
        client.call(1, b"x", flag=1, grpc_encoding="br")
        trailers = await client.trailers(1)
        assert trailers["grpc-status"] == "12"
        assert trailers["grpc-accept-encoding"] == "identity,deflate,gzip,snappy,zstd"
        assert site.handler.refusals == [Reason.CONTENT_ENCODING]
        for stream, name in ((3, "zstd"), (5, "identity"), (7, None)):
            client.call(stream, b"x", flag=int(name == "zstd"), grpc_encoding=name)
            assert await client.status(stream) == 0
        client.call(9, b"plain", grpc_encoding="gzip")
        assert await client.status(9) == 0
        assert [one.encoding for one in site.handler.requests[1:]] == ["zstd", "", "", ""]

    serve(scenario)


def test_the_text_of_an_error_is_percent_encoded_and_no_line_of_its_own():
    async def scenario(site):
        site.handler.answer = OtlpAnswer(AnswerStatus.BAD_DATA, "100 % \u00e9\r\nx")
        client = await site.connect()
        client.call(1)
        assert (await client.trailers(1))["grpc-message"] == "100 %25 %C3%A9%0D%0Ax"

    serve(scenario)


def test_a_defect_is_one_calls_alone():
    async def scenario(site):
        client = await site.connect()
        site.handler.fault = ValueError("a defect")
        client.call(1)
        assert await client.status(1) == 13
        assert site.handler.refusals == [Reason.INTERNAL]
        site.handler.fault = None
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario)
