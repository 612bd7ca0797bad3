"""Where a process runs: what is read of it, and how much of it."""

from ingero.wire.process_resource import MAX_DEVICES_CHARS, join_devices, read_process_resource

MANY = [f"nvidia.com/gpu=GPU-{number:08d}-0000-0000-0000-000000000000" for number in range(200)]


def test_devices_are_sorted_and_of_more_than_fit_the_first_are_kept_whole():
    assert join_devices(["b=2", "a=1"]) == "a=1,b=2"
    assert join_devices([]) == ""
    text = join_devices(MANY)
    assert len(text) <= MAX_DEVICES_CHARS < len(text) + len(MANY[0]) + 1
    assert text.split(",") == MANY[: text.count(",") + 1]


def test_a_list_of_devices_may_be_longer_than_a_name():
    text = join_devices(MANY)
    assert read_process_resource({"ingero.device.ids": text, "k8s.pod.name": "x" * 257}) == (
        ("ingero.device.ids", text),
    )
    assert read_process_resource({"ingero.device.ids": text + "x" * 100, "host.name": "n"}) == ()
