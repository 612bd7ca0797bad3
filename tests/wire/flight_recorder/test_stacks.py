"""A stack says whether a rank is in a call of torch.distributed."""

import pytest

from ingero.model.hang import Whereabouts
from ingero.wire.flight_recorder.stacks import find_whereabouts, split_ranks

LIBRARY = "/env/lib/python3.11/site-packages/torch/distributed"


def threads(*innermost):
    return "\n".join(
        f'Thread 0x{i:016x} (most recent call first):\n  File "{file}", line 3 in f\n  File "/me/train.py", line 9 in <module>\n'
        for i, file in enumerate(innermost)
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (threads(f"{LIBRARY}/distributed_c10d.py"), Whereabouts.INSIDE),
        (threads("/me/train.py", f"{LIBRARY}/pipelining/schedules.py"), Whereabouts.INSIDE),
        (threads("/me/train.py"), Whereabouts.OUTSIDE),
        (threads("/me/train.py", f"{LIBRARY}/elastic/timer/api.py"), Whereabouts.OUTSIDE),
        (threads(f"{LIBRARY}/debug/_frontend.py"), Whereabouts.OUTSIDE),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", None),
        ("", None),
        (
            'Thread 7 (idle): "MainThread"\n    recv (torch/distributed/distributed_c10d.py:2799)\n    main (train.py:3)\n',
            Whereabouts.INSIDE,
        ),
        ('Thread 7 (active): "MainThread"\n    load (train.py:2)\n', Whereabouts.OUTSIDE),
    ],
)
def test_the_innermost_frames_decide(text, where):
    assert find_whereabouts(text) is where


def test_the_debug_servers_text_is_split_by_rank():
    text = "PARTIAL DATA\n\n=== Rank 0: http://a:1/h? ===\nA\n=== Rank 11: http://b:2/h? ===\nB\n"
    assert {rank: body.strip() for rank, body in split_ranks(text).items()} == {0: "A", 11: "B"}
