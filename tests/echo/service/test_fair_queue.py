"""Who gets the next place."""

import asyncio

import pytest

from ingero.echo.service.fair_queue import FairQueue, QueueFullError, tenant_of
from ingero.echo.service.replies import build_error_reply
from ingero.errors import RetryableError
from ingero.serving.bearer import Principal
from ingero.units import NS_PER_MS, NS_PER_S


def serve_all(turns, asked):
    """Everybody asks at once; the order in which they were let in."""

    async def scenario():
        served = []

        async def ask(tenant):
            async with turns.take(tenant):
                served.append(tenant)
                await asyncio.sleep(0)

        await asyncio.gather(*(ask(tenant) for tenant in asked))
        return served

    return asyncio.run(scenario())


def test_a_waiting_tenant_goes_before_anothers_second_question():
    turns = FairQueue("it", 1, 1, 10 * NS_PER_S)
    assert serve_all(turns, "aaaabbc") == list("abcabaa")


def test_one_tenant_never_has_more_than_its_share_and_the_rest_is_for_others():
    turns = FairQueue("it", 4, 1, 10 * NS_PER_S)
    assert serve_all(turns, "aaab")[:2] == ["a", "b"]


def test_a_full_queue_and_a_late_place_are_said_with_when_to_come_back():
    async def scenario():
        turns = FairQueue("it", 1, 1, 30 * NS_PER_MS, max_waiting=2)
        await turns.acquire("a")
        waiting = [asyncio.ensure_future(turns.acquire("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as full:
            await turns.acquire("a")
        late = await asyncio.gather(*waiting, return_exceptions=True)
        turns.release("a")
        await turns.acquire("a")  # the place is not lost
        return full.value, late, turns.n_waiting

    full, late, n_waiting = asyncio.run(scenario())
    assert all(type(one) is RetryableError for one in late)
    assert n_waiting == 0
    assert (build_error_reply(full).status, build_error_reply(full).retry_after_s > 0) == (
        429,
        True,
    )
    assert (build_error_reply(late[0]).status, build_error_reply(late[0]).code) == (503, "busy")


def test_who_leaves_the_queue_leaves_its_place_to_the_next():
    async def scenario():
        turns = FairQueue("it", 1, 1, 30 * NS_PER_S)
        await turns.acquire("a")
        leaving, staying = (asyncio.ensure_future(turns.acquire(who)) for who in "bc")
        await asyncio.sleep(0)
        leaving.cancel()
        turns.release("a")
        await staying
        return turns.n_waiting

    assert asyncio.run(scenario()) == 0


def test_tokens_of_one_list_of_clusters_are_one_tenant_and_operators_are_each_their_own():
    one, two = (Principal(name, name, frozenset({"c1", "c2"})) for name in "xy")
    assert tenant_of(one) == tenant_of(two)
    assert tenant_of(Principal("x", "x", None)) != tenant_of(Principal("y", "y", None))
