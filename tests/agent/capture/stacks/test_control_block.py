"""Which thread a pthread_self() belongs to, and what a control block looks like, on both processors."""

import ctypes
import os
import threading

import pytest

from ingero.agent.capture.stacks.control_block import (
    IS_ARM,
    MAX_BLOCK_BYTES,
    is_control_block,
    is_own_block,
)
from ingero.agent.capture.stacks.memory import RemoteMemory

BLOCK = 0x7FFF_0000


@pytest.mark.parametrize(
    ("pointer", "is_arm", "expected"),
    [
        (BLOCK, False, True),
        (BLOCK + 1856, False, False),
        (BLOCK + 1856, True, True),  # glibc 2.36
        (BLOCK + 200, True, True),  # musl 1.2
        (BLOCK - 1, True, False),
        (BLOCK + MAX_BLOCK_BYTES + 1, True, False),
        (0, False, False),
        (0, True, False),
    ],
)
def test_a_block_belongs_to_the_thread_whose_pointer_leads_to_it(pointer, is_arm, expected):
    assert is_own_block(BLOCK, pointer, is_arm=is_arm) is expected
    assert not is_own_block(0, pointer, is_arm=is_arm)


def test_the_blocks_of_this_process_are_known_and_other_memory_is_not():
    blocks = [threading.get_ident()]
    thread = threading.Thread(target=lambda: blocks.append(threading.get_ident()))
    thread.start()
    thread.join()
    other = ctypes.create_string_buffer(512)
    memory = RemoteMemory(os.getpid())
    try:
        assert is_control_block(memory, blocks[0])
        assert not is_control_block(memory, ctypes.addressof(other))
    finally:
        memory.close()


def test_on_arm64_a_block_is_known_by_its_threads_number_in_its_own_namespace():
    """Written as glibc lays it out: padding of 24 words, a list of two, the thread's number."""
    block = ctypes.create_string_buffer(256)
    at = ctypes.addressof(block)
    memory = RemoteMemory(os.getpid())
    try:
        assert not is_control_block(memory, at, is_arm=True)
        ctypes.c_uint32.from_address(at + 208).value = threading.get_native_id()
        assert is_control_block(memory, at, is_arm=True)
        assert is_control_block(memory, at, is_arm=False) is IS_ARM
    finally:
        memory.close()
