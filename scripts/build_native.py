"""Builds what is not Python: the BPF objects, the GPU simulator and the plug-in for NCCL.

Everything is made for both kinds of processor, whichever this machine has, as the compiler knows both. Needs PyPI's
``ziglang`` and nothing else (``--clang`` takes another compiler for the BPF objects). Called by the package build
(``hatch_build.py``), by ``scripts/setup`` and by ``make native``, so there is one list of flags. An output that is
newer than all it is made of is left alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "src/ingero/agent/capture/kernel/objects"
SIMULATOR = ROOT / "src/ingero/sim/native"
PLUGIN = ROOT / "src/ingero/agent/collectives/native"
ZIG = (sys.executable, "-m", "ziglang")
# As `uname -m` says, with the name that libbpf's headers have.
MACHINES = {"x86_64": "x86", "aarch64": "arm64"}
BPF_FLAGS = (
    *("-target", "bpfel", "-mcpu=v3", "-std=gnu11", "-g", "-O2"),
    *("-Wall", "-Wextra", "-Werror", "-Wpadded", "-Wpacked", "-Wunaligned-access"),
    # Headers hold maps and functions that not every object uses; designated initialisers zero the rest on purpose.
    *("-Wno-unused-function", "-Wno-unused-variable", "-Wno-missing-field-initializers"),
)
SIM_FLAGS = (
    *("-std=gnu11", "-O1", "-g0", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    # Every probed function keeps a frame of its own and begins by pushing the frame pointer, as in NVIDIA's libraries:
    # the kernel emulates that instruction, where it would have to single-step another.
    *("-fno-optimize-sibling-calls", "-fno-inline", "-fno-sanitize=all"),
    *(
        "-fno-omit-frame-pointer",
        "-mno-omit-leaf-frame-pointer",
        "-mllvm",
        "-enable-shrink-wrap=false",
    ),
)
GLIBC = "2.28"
SIM_LIBRARIES = (
    ("libcuda.so.1", "cuda.c", ()),
    ("libcudart.so.12", "cudart.c", ("libcuda.so.1",)),
    ("libnccl.so.2", "nccl.c", ("libcuda.so.1",)),
    ("libnvidia-ml.so.1", "nvml.c", ()),
)
SIM_PROGRAMS = ("workload", "job")
PLUGIN_NAME = "libnccl-profiler-ingero.so"
PLUGIN_FLAGS = (
    *("-std=gnu11", "-O2", "-g0", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    # NCCL loads it into the training process: it shows its three symbols and nothing else.
    *("-fvisibility=hidden", "-fno-sanitize=all", "-shared", f"-Wl,-soname,{PLUGIN_NAME}"),
    "-Wl,-s",  # as below
)


def is_fresh(target: Path, sources: Iterable[Path]) -> bool:
    """Whether the target is newer than all that it is made of."""
    if not target.exists():
        return False
    made = target.stat().st_mtime_ns
    return all(source.stat().st_mtime_ns <= made for source in sources)


def run(*command: object) -> None:
    """Run a compiler; its own message is the error."""
    if subprocess.run([str(part) for part in command], check=False, cwd=ROOT).returncode:
        sys.exit(f"build_native: failed: {' '.join(map(str, command))}")


def build_objects(clang: tuple[str, ...]) -> Iterator[Path]:
    """Compile every ``bpf/*.bpf.c`` for every machine."""
    headers = [*ROOT.glob("bpf/include/**/*.h"), Path(__file__)]
    for machine, define in MACHINES.items():
        for source in sorted(ROOT.glob("bpf/*.bpf.c")):
            target = OBJECTS / machine / source.name.replace(".bpf.c", ".bpf.o")
            if not is_fresh(target, [source, *headers]):
                target.parent.mkdir(parents=True, exist_ok=True)
                run(
                    *(*clang, *BPF_FLAGS, f"-D__TARGET_ARCH_{define}"),
                    *("-Ibpf/include", f"-ffile-prefix-map={ROOT}=."),
                    *("-c", source, "-o", target),
                )
            yield target


def build_simulator(machine: str) -> Iterator[Path]:
    """Link the simulator's libraries and its workloads for a machine."""
    out = SIMULATOR / machine
    sources = [*ROOT.glob("gpusim/*"), Path(__file__)]
    compiler = (*ZIG, "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", *SIM_FLAGS)
    rpath = "-Wl,-rpath,$ORIGIN"
    out.mkdir(parents=True, exist_ok=True)
    for name, source, needs in SIM_LIBRARIES:
        target = out / name
        if not is_fresh(target, sources):
            needed = [out / need for need in needs]
            run(
                *(*compiler, "-shared", f"-Wl,-soname,{name}", rpath, f"gpusim/{source}"),
                *(*needed, "-o", target, "-lpthread"),
            )
        yield target
    for program in SIM_PROGRAMS:
        target = out / program
        if not is_fresh(target, sources):
            needed = [out / name for name, source, _ in SIM_LIBRARIES if source != "nvml.c"]
            # Without what zig's own start files tell of the folder in which they were first compiled, and with the
            # names of functions, which stacks are shown by.
            run(
                *compiler,
                "-rdynamic",
                "-Wl,-s",
                rpath,
                f"gpusim/{program}.c",
                *needed,
                "-o",
                target,
            )
        yield target


def build_plugin(machine: str) -> Iterator[Path]:
    """Link the plug-in that NCCL loads, for a machine."""
    target = PLUGIN / machine / PLUGIN_NAME
    sources = sorted(ROOT.glob("ncclprof/*.c"))
    if not is_fresh(target, [*sources, *ROOT.glob("ncclprof/*.h"), Path(__file__)]):
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = (*ZIG, "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", *PLUGIN_FLAGS)
        # Through a rename: a training process may have the old one mapped, and another build may run.
        made = target.with_suffix(f".{os.getpid()}")
        # By names that are the same in every checkout: a linker keeps them. zig's cache would give the objects of an
        # absolute name for a relative one, but for the flag.
        names = [source.relative_to(ROOT) for source in sources]
        run(*compiler, f"-ffile-prefix-map={ROOT}=.", *names, "-o", made, "-lpthread")
        made.replace(target)
    yield target


def build_all(clang: tuple[str, ...] = (*ZIG, "clang")) -> list[Path]:
    """Build everything; returns the files."""
    made = [*build_objects(clang)]
    for machine in MACHINES:
        made += [*build_simulator(machine), *build_plugin(machine)]
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clang", help="a clang that knows BPF, instead of ziglang's")
    options = parser.parse_args()
    for path in build_all((options.clang,) if options.clang else (*ZIG, "clang")):
        print(path.relative_to(ROOT))
