"""Two processes share a GPU where both are known to mean the same one, whatever number each has for it."""

import pytest

from ingero.model.gpu_view import UNKNOWN, GpuView, find_same, merge_views

HOST = tuple(f"nvidia{number}" for number in range(4))
ALL = [(mine, theirs) for mine in range(4) for theirs in range(4)]
SAME = {(number, number) for number in range(4)}
CAPS = ("nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2", "nvidia0")


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        (None, None, SAME),  # a recording of an earlier version
        (GpuView(HOST), None, set()),
        (GpuView(HOST), GpuView(HOST), SAME),
        (GpuView(), GpuView(), SAME),  # another maker's devices
        (GpuView(("nvidia0",)), GpuView(("nvidia1",)), set()),  # a container each
        (GpuView(("nvidia1",)), GpuView(("nvidia1",)), {(0, 0)} | SAME),
        (GpuView(("nvidia1",), "0"), GpuView(("nvidia1",)), {(0, 0)}),
        (GpuView(("nvidia1",)), GpuView(HOST), set()),  # CUDA may count in another order
        (GpuView(HOST, "2"), GpuView(HOST, "3"), set()),
        (GpuView(HOST, "2,3"), GpuView(HOST, " 3 ,1"), {(1, 0)}),
        (GpuView(HOST, "2"), GpuView(HOST), {(0, 2)}),
        (GpuView(HOST, "2", "PCI_BUS_ID"), GpuView(HOST, "2"), set()),
        (GpuView(HOST, "2", "FASTEST_FIRST"), GpuView(HOST, "2"), {(0, 0)}),
        (GpuView(HOST, "GPU-8f,GPU-91"), GpuView(HOST, "GPU-91"), {(1, 0)}),
        (GpuView(HOST, "GPU-8f"), GpuView(HOST, "0"), set()),  # which number it has is not known
        (GpuView(CAPS, "MIG-1"), GpuView(CAPS, "MIG-2"), set()),
        (GpuView(CAPS, "MIG-1"), GpuView(CAPS, "MIG-1"), {(0, 0)}),
        (GpuView(CAPS), GpuView((*CAPS[:1], "nvidia0")), set()),
        (GpuView(HOST, ""), GpuView(HOST, ""), set()),
        (GpuView(HOST, "-1"), GpuView(HOST, "-1"), set()),
        (GpuView(HOST, "no number"), GpuView(HOST, "no number"), set()),
        (UNKNOWN, UNKNOWN, set()),
    ],
)
def test_pairs_of_numbers_that_mean_one_device(one, other, pairs):
    assert find_same(one, other, ALL) == pairs
    assert find_same(other, one, [(b, a) for a, b in ALL]) == {(b, a) for a, b in pairs}


def test_a_process_of_which_two_things_are_said_shares_with_nobody():
    known = {}
    for view in (GpuView(HOST), GpuView(HOST), GpuView(HOST, "2"), GpuView(HOST, "2")):
        merge_views(known, {41: view, 42: GpuView(HOST)})
    assert find_same(known[41], GpuView(HOST, "2"), ALL) == set()
    assert find_same(known[42], GpuView(HOST), ALL) == SAME
