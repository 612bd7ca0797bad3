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


LIBRARY = """
extern int cudaMalloc(void **, unsigned long);
__attribute__((section(".nvFatBinSegment"), used)) static int device_code[4];
int allocate(void)
{
	void *block;
	return cudaMalloc(&block, 64) != 0;
}
"""


def build_with_static_runtime(folder, *, is_stripped):
    """Build it; skips the test where the wheel with NVIDIA's archive is not installed.

    The program loads the driver's library that it is given, says "ready", and calls the runtime after a line of input.
    """
    return _build(folder, "program", PROGRAM, ["-s"] if is_stripped else [])


def build_library_with_static_runtime(folder, name="libtraining.so", *, is_stripped=False):
    """The same as a library, which exports nothing but ``int allocate(void)``: 1 where the runtime fails."""
    exports = folder / "exports"
    exports.write_text("{ global: allocate; local: *; };\n")
    flags = ["-shared", "-fPIC", f"-Wl,--version-script={exports}"]
    return _build(folder, name, LIBRARY, flags + (["-s"] if is_stripped else []))


def _build(folder, name, code, flags):
    try:
        (archive,) = [
            file.locate()
            for file in files("nvidia-cuda-runtime-cu12")
            if file.name == "libcudart_static.a"
        ]
    except PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime-cu12 is not installed")
    source, built = folder / "source.c", folder / name
    source.write_text(code)
    subprocess.run(
        [
            *(*CC, "-Wl,--no-gc-sections", *flags, str(source), str(archive)),
            *("-ldl", "-lpthread", "-lrt", "-o", str(built)),
        ],
        check=True,
    )
    return built
