"""What real gRPC clients notice of their connection."""

import threading
from contextlib import contextmanager


@contextmanager
def watch_channel(channel, callback):
    """Connect, and have a callback receive every state; the thread that looks for them has ended afterwards.

    Left to itself it fails when the channel is closed while it looks, in whichever test is then running.
    """
    before = set(threading.enumerate())
    channel.subscribe(callback, try_to_connect=True)
    started = set(threading.enumerate()) - before
    try:
        yield
    finally:
        channel.unsubscribe(callback)
        for thread in started:
            thread.join(30)
            assert not thread.is_alive()
