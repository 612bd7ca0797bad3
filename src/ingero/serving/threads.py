"""Work that blocks, for an event loop: on a thread, and stopped when its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio

ResultT = TypeVar("ResultT")


async def run_on_thread(
    pool: ThreadPoolExecutor | None,
    work: Callable[[], ResultT],
    stop: Callable[[], object] | None = None,
) -> ResultT:
    """The result of ``work``; when the caller is cancelled, the work is stopped and has ended when this returns.

    Args:
        pool: Whose threads; None for those of the event loop.
        work: What blocks.
        stop: Ends it, from the event loop's thread; None where nothing can.
    """
    running = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        # A place is free when its thread is; a scope of anyio would cancel the waiting as well.
        with anyio.CancelScope(shield=True):
            await asyncio.gather(running, return_exceptions=True)
        raise
    finally:
        del (
            running
        )  # its exception has this frame, which would keep all that the work had until a collection
