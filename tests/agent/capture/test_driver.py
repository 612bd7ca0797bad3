"""A driver is one that answers: the control device's file alone proves nothing."""

import os
import stat

import pytest

from ingero.agent.capture.gpu.driver import has_driver


def test_a_control_device_that_opens_is_a_driver(tmp_path):
    control = tmp_path / "nvidiactl"
    assert not has_driver(control)
    control.touch()
    assert has_driver(control)


@pytest.mark.kernel
def test_a_control_device_that_nobody_answers_for_is_no_driver(tmp_path):
    """As libcuda leaves it for root where no driver is loaded; these numbers are of no driver anywhere."""
    control = tmp_path / "nvidiactl"
    os.mknod(control, stat.S_IFCHR | 0o666, os.makedev(511, 255))
    assert control.exists()
    assert not has_driver(control)
