"""What work on a thread had is let go of when it is over, however it ended."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.service.executor import unless_gone
from ingero.serving.threads import run_on_thread


class Held:
    """Something that work has while it runs."""


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_failed_work_had_is_gone_with_its_error_and_needs_no_collection(no_collections):
    left = []

    def work():
        held = Held()
        left.append(weakref.ref(held))
        raise ValueError(held.__class__.__name__)

    async def ask(pool):
        running = run_on_thread(pool, work, Cancellation().set)
        with pytest.raises(ValueError, match="Held"):
            await unless_gone(running, asyncio.Event())

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(ask(pool))
    assert [ref() for ref in left] == [None]
