"""An MCP server in front of questions that may fail, asked by the official client over memory."""

import anyio
from mcp import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.memory import create_client_server_memory_streams

from ingero.recording.queries.catalog import QUERIES
from ingero.serving.mcp import McpFacts, build_mcp_server


def ask(name, call):
    """What the answer says that went wrong."""
    server = build_mcp_server(McpFacts("t", "0", "none"), QUERIES, (), call)
    said = []

    async def main():
        async with (
            create_client_server_memory_streams() as (near, far),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(server.run, *far, server.create_initialization_options())
            async with ClientSession(*near) as session:
                await session.initialize()
                try:
                    answer = await session.call_tool(name, {})
                    said.append(answer.content[0].text)
                except MCPError as error:
                    said.append(error.message)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    (text,) = said
    return text


async def miss_a_key(_name, _arguments):
    raise KeyError("of the question's own")


def test_a_fault_inside_a_question_is_no_missing_tool_and_shows_only_the_log_its_text(caplog):
    assert ask("get_check", miss_a_key) == "the answer could not be built; the log has the reason"
    assert "of the question's own" in caplog.text


def test_a_tool_that_does_not_exist_is_named_so():
    assert ask("get_nothing", miss_a_key) == "no such tool"
