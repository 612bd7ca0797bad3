"""A program with NVIDIA's CUDA runtime linked in, as vendors ship theirs."""

import subprocess
from importlib.metadata import PackageNotFoundError, files

import pytest
from tests.support.compiler import CC

PROGRAM = """
#include <dlfcn.h>
#include <stdio.h>
extern int cudaMalloc(void **, unsigned long);
__attribute__((section(".nvFatBinSegment"), used)) static int device_code[4];
int main(int argc, char **argv)
{
	void *block;
	if (!dlopen(argv[1], RTLD_NOW))
		return 1;
	puts("ready");
	fflush(stdout);
	getchar();
	return cudaMalloc(&block, argc) == 1;
}
"""


def build_with_static_runtime(folder, *, is_stripped):
    """Build it; skips the test where the wheel with NVIDIA's archive is not installed.

    The program loads the driver's library that it is given, says "ready", and calls the runtime after a line of input.
    """
    try:
        (archive,) = [
            file.locate()
            for file in files("nvidia-cuda-runtime-cu12")
            if file.name == "libcudart_static.a"
        ]
    except PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime-cu12 is not installed")
    source, program = folder / "program.c", folder / "program"
    source.write_text(PROGRAM)
    strip = ["-s"] if is_stripped else []
    subprocess.run(
        [
            *(*CC, "-Wl,--no-gc-sections", *strip, str(source), str(archive)),
            *("-ldl", "-lpthread", "-lrt", "-o", str(program)),
        ],
        check=True,
    )
    return program
