"""What is compiled is there for both kinds of processor, and one wheel brings it to each."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from scripts.build_native import MACHINES, PLUGIN_NAME, SIM_LIBRARIES, SIM_PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
ELF_NAMES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
NATIVE = [
    *(f"ingero/sim/native/{{}}/{name}" for name, _, _ in SIM_LIBRARIES),
    *(f"ingero/sim/native/{{}}/{name}" for name in SIM_PROGRAMS),
    f"ingero/agent/collectives/native/{{}}/{PLUGIN_NAME}",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.iterdir()
    with zipfile.ZipFile(made) as opened:
        yield opened


@pytest.mark.parametrize("machine", MACHINES)
def test_the_wheel_holds_each_program_and_library_for_each_processor(wheel, machine):
    for pattern in NATIVE:
        with wheel.open(pattern.format(machine)) as file:
            assert ELFFile(file)["e_machine"] == ELF_NAMES[machine], pattern


@pytest.mark.parametrize("machine", MACHINES)
def test_the_wheel_holds_every_bpf_object_for_each_processor(wheel, machine):
    folder = f"ingero/agent/capture/kernel/objects/{machine}/"
    found = {name.removeprefix(folder) for name in wheel.namelist() if name.startswith(folder)}
    sources = {path.name.replace(".bpf.c", ".bpf.o") for path in ROOT.glob("bpf/*.bpf.c")}
    assert found >= sources > set()


def test_the_wheel_may_be_installed_on_each_processor(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    tags = {
        line.removeprefix("Tag: ")
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Tag: ")
    }
    assert tags == {f"py3-none-manylinux_2_28_{machine}" for machine in MACHINES}
