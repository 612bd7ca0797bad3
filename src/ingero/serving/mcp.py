"""Questions and recipes over MCP: the official SDK's low-level server with our own schemas.

The SDK validates no arguments at this level; `Query` does, both ways. What a question raises becomes a result that is
an error, so that an assistant reads it and can correct its call.

Source: Model Context Protocol 2026-07-28 and the initialize-handshake versions before it, as mcp 2.3 speaks them.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import anyio
import mcp_types as types
import msgspec
from anyio.streams.memory import MemoryObjectSendStream
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from ingero.errors import IngeroError
from ingero.serving.mcp_refusals import build_refusal, check_id
from ingero.serving.query import Prompt, Query

Call = Callable[[str, Mapping[str, Any]], Awaitable[bytes]]
"""Answers a question of that name with encoded JSON. Raises an `IngeroError` whose message may be shown.

What else it raises is a defect: it is logged, and its text is not sent.
"""

_Context = ServerRequestContext[Any]
_LOG: Final = logging.getLogger("ingero.serving.mcp")
_STDIN: Final = 0
_CHUNK_BYTES: Final = 1 << 16
_CRASHED: Final = "the answer could not be built; the log has the reason"


@dataclass(frozen=True, slots=True)
class McpFacts:
    """What a server says of itself.

    Attributes:
        name: Its name.
        version: Its release.
        instructions: For the assistant: what is here and where to begin.
    """

    name: str
    version: str
    instructions: str


def build_mcp_server(
    facts: McpFacts,
    queries: Sequence[Query[Any, Any, Any]],
    prompts: Sequence[Prompt],
    call: Call,
) -> Server[Any]:
    """An MCP server that lists these questions and recipes and answers through ``call``."""
    tools = [_build_tool(query) for query in queries]
    names = {tool.name for tool in tools}
    recipes = {prompt.name: prompt for prompt in prompts}

    async def list_tools(
        context: _Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        del context, params
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        context: _Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        del context
        if params.name not in names:
            raise MCPError(types.INVALID_PARAMS, "no such tool")
        return await _answer(call, params.name, params.arguments or {})

    async def list_prompts(
        context: _Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        del context, params
        return types.ListPromptsResult(prompts=[_build_prompt(one) for one in prompts])

    async def get_prompt(
        context: _Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        del context
        return _render(recipes, params)

    return Server(
        facts.name,
        version=facts.version,
        instructions=facts.instructions,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve on standard input and output until the input ends.

    A line that is no message is answered, too, unless it is empty: the SDK drops it, and its sender would wait.
    """
    with _take_input() as fd:
        read: deque[str] = deque()
        # The SDK only iterates over it.
        stdin = cast("anyio.AsyncFile[str]", _iter_lines(fd, read))
        async with stdio_server(stdin) as (lines, answers), anyio.create_task_group() as tasks:
            into, messages = anyio.create_memory_object_stream[SessionMessage | Exception]()
            tasks.start_soon(_pass_on, _join(lines, read), into, answers.send)
            await server.run(messages, answers, server.create_initialization_options())


@contextmanager
def _take_input() -> Iterator[int]:
    """A descriptor of standard input, which is the null device meanwhile, so that no child reads a message."""
    fd = fcntl.fcntl(_STDIN, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _STDIN)
        os.close(null)
        yield fd
    finally:
        os.dup2(fd, _STDIN)
        os.close(fd)


async def _iter_lines(fd: int, read: deque[str]) -> AsyncIterator[str]:
    """What can be read until it ends, by lines, each of which is appended to ``read`` as well.

    The SDK's own reads on a thread, which no cancellation ends while nobody writes; this waits on the event loop.
    """
    begun = bytearray()
    is_open = True
    while is_open:
        with suppress(PermissionError):  # epoll(7) takes no regular file, which is always readable
            await anyio.wait_readable(fd)
        chunk = os.read(fd, _CHUNK_BYTES)
        is_open = bool(chunk)
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            read.append((begun + end).decode(errors="replace"))
            yield read[-1]
            begun.clear()
        begun += rest
    if begun:
        read.append(begun.decode(errors="replace"))
        yield read[-1]


async def _join(
    lines: AsyncIterable[SessionMessage | Exception], read: deque[str]
) -> AsyncIterator[tuple[SessionMessage | Exception, str]]:
    """What the SDK made of each line, and the line."""
    async for line in lines:
        yield line, read.popleft()


async def _pass_on(
    lines: AsyncIterable[tuple[SessionMessage | Exception, str]],
    into: MemoryObjectSendStream[SessionMessage | Exception],
    answer: Callable[[SessionMessage], Awaitable[None]],
) -> None:
    async with into:
        async for line, text in lines:
            if isinstance(line, Exception):
                if text.strip():
                    await answer(SessionMessage(build_refusal(line)))
            elif (refused := check_id(line.message, text)) is not None:
                await answer(SessionMessage(refused))
            else:
                await into.send(line)


def _build_tool(query: Query[Any, Any, Any]) -> types.Tool:
    return types.Tool(
        name=query.name,
        title=query.title,
        description=query.description,
        input_schema=query.input_schema(),
        output_schema=query.output_schema(),
        annotations=types.ToolAnnotations(
            read_only_hint=query.is_read_only,
            destructive_hint=False,
            idempotent_hint=query.is_read_only,
            open_world_hint=query.is_open_world,
        ),
    )


def _build_prompt(prompt: Prompt) -> types.Prompt:
    return types.Prompt(
        name=prompt.name,
        description=prompt.description,
        arguments=[
            types.PromptArgument(name=one.name, description=one.description, required=one.required)
            for one in prompt.arguments
        ],
    )


async def _answer(call: Call, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
    try:
        encoded = await call(name, arguments)
    except IngeroError as error:
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)], is_error=True
        )
    except Exception:  # noqa: BLE001 - one question's defect must not show its insides, nor be invisible
        _LOG.exception("%s: %s", name, _CRASHED)
        raise MCPError(types.INTERNAL_ERROR, _CRASHED) from None
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=encoded.decode())],
        structured_content=msgspec.json.decode(encoded),
    )


def _render(
    recipes: Mapping[str, Prompt], params: types.GetPromptRequestParams
) -> types.GetPromptResult:
    prompt = recipes.get(params.name)
    if prompt is None:
        raise MCPError(types.INVALID_PARAMS, "no such prompt")
    given = dict(params.arguments or {})
    missing = [one.name for one in prompt.arguments if one.required and not given.get(one.name)]
    if missing:
        raise MCPError(types.INVALID_PARAMS, f"missing argument: {', '.join(missing)}")
    return types.GetPromptResult(
        description=prompt.description,
        messages=[
            types.PromptMessage(
                role="user", content=types.TextContent(type="text", text=prompt.render(given))
            )
        ],
    )
