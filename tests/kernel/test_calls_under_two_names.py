"""Functions that are one operation and call each other: one call that the program made is one call. Real uprobes."""

import subprocess
from dataclasses import dataclass

import pytest
from tests.kernel.conftest import Traced
from tests.support.compiler import CC

from ingero.agent.capture.kernel.abi import Flag
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.config.environment import ProbeMode
from ingero.model.events import CopyKind, CudaOp, DriverOp, GraphOp, Source

pytestmark = pytest.mark.kernel

# As NVIDIA's of CUDA 13: what <<<>>> compiles to jumps to the documented function, and graphs go on in the driver under the same name.
LIBRARY = """
#include <stddef.h>
typedef struct { unsigned x, y, z; } dim3;
typedef void *any;
#define LAUNCH(name) int name(const void *kernel, dim3 grid, dim3 block, any *values, size_t shared, any stream)
#define KEEP_FRAME() __asm__ volatile("" ::: "memory")
__attribute__((noinline)) int cuStreamSynchronize(any stream)
{
	KEEP_FRAME();
	return stream != 0;
}
__attribute__((noinline)) LAUNCH(cudaLaunchKernel)
{
	cuStreamSynchronize(0);
	return kernel && grid.x && block.x ? (int)shared : 1;
}
__attribute__((noinline)) LAUNCH(cudaLaunchKernel_ptsz)
{
	return kernel && grid.x && block.x ? (int)shared : 1;
}
LAUNCH(__cudaLaunchKernel)
{
	__attribute__((musttail)) return cudaLaunchKernel(kernel, grid, block, values, shared, stream);
}
LAUNCH(__cudaLaunchKernel_ptsz)
{
	int rc = cudaLaunchKernel_ptsz(kernel, grid, block, values, shared, stream);

	KEEP_FRAME();
	return rc;
}
/* Calls one that jumps to a third. */
LAUNCH(cudaLaunchCooperativeKernel)
{
	int rc = __cudaLaunchKernel(kernel, grid, block, values, shared, stream);

	KEEP_FRAME();
	return rc;
}
__attribute__((noinline)) int cuGraphLaunch(any exec, any stream)
{
	return exec == stream ? 0 : 700;
}
int cudaGraphLaunch(any exec, any stream)
{
	int rc = cuGraphLaunch((char *)exec - 1, stream);

	KEEP_FRAME();
	return rc;
}
__attribute__((noinline)) int cudaMallocPitch(any *block, size_t *pitch, size_t width, size_t height)
{
	*block = pitch;
	return width == height;
}
__attribute__((noinline)) int cuMemAlloc_v2(any *block, size_t size)
{
	size_t pitch;
	int rc = cudaMallocPitch(block, &pitch, size, 1);

	KEEP_FRAME();
	return rc;
}
int cudaMalloc(any *block, size_t size)
{
	int rc = cuMemAlloc_v2(block, size);

	KEEP_FRAME();
	return rc;
}
__attribute__((noinline)) int cudaMallocHost(any *block, size_t size)
{
	*block = (any)size;
	return 0;
}
int cudaHostAlloc(any *block, size_t size, unsigned flags)
{
	int rc = cudaMallocHost(block, size + flags);

	KEEP_FRAME();
	return rc;
}
__attribute__((noinline)) int cudaMemcpy3DAsync(const size_t *copy, any stream)
{
	return stream != 0;
}
int cudaMemcpy3D(const size_t *copy)
{
	int rc = cudaMemcpy3DAsync(copy, 0);

	KEEP_FRAME();
	return rc;
}
"""
PROGRAM = """
#include <stddef.h>
typedef struct { unsigned x, y, z; } dim3;
typedef void *any;
#define LAUNCH(name) int name(const void *, dim3, dim3, any *, size_t, any)
LAUNCH(cudaLaunchKernel);
LAUNCH(__cudaLaunchKernel);
LAUNCH(__cudaLaunchKernel_ptsz);
LAUNCH(cudaLaunchCooperativeKernel);
int cuGraphLaunch(any, any);
int cudaGraphLaunch(any, any);
int cudaMalloc(any *, size_t);
int cudaHostAlloc(any *, size_t, unsigned);
int cudaMemcpy3D(const size_t *);
#define TIMES(n) for (int i = 0; i < (n); i++)
int main(void)
{
	dim3 grid = {3, 1, 1}, block = {5, 1, 1};
	size_t copy[20] = {[16] = 7, [17] = 5, [18] = 3, [19] = 1};
	char exec[2];
	any out;

	TIMES(3) cudaLaunchKernel(exec, grid, block, 0, 0, 0);
	TIMES(29) __cudaLaunchKernel(exec, grid, block, 0, 0, 0);
	TIMES(2) __cudaLaunchKernel(exec, grid, block, 0, 98, 0);
	TIMES(31) __cudaLaunchKernel_ptsz(exec, grid, block, 0, 0, 0);
	TIMES(37) cudaLaunchCooperativeKernel(exec, grid, block, 0, 0, 0);
	TIMES(11) cudaGraphLaunch(exec + 1, exec);
	TIMES(1) cudaGraphLaunch(exec, exec);
	TIMES(5) cuGraphLaunch(exec, exec);
	TIMES(13) cudaMalloc(&out, 1000);
	TIMES(7) cudaHostAlloc(&out, 64, 1);
	TIMES(17) cudaMemcpy3D(copy);
	return 0;
}
"""
# As NVIDIA's: another library of the same process, which the first finds by its path.
REAL = """
#include <stddef.h>
typedef void *any;
int cudaMalloc(any *block, size_t size)
{
	*block = (any)size;
	return size == 77 ? 2 : 0;
}
int cudaStreamSynchronize(any stream)
{
	return stream != 0;
}
"""
STAND_IN = """
#include <dlfcn.h>
#include <stddef.h>
typedef void *any;
static any real(const char *name)
{
	return dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), name);
}
int cudaMalloc(any *block, size_t size)
{
	return ((int (*)(any *, size_t))real("cudaMalloc"))(block, size);
}
int cudaStreamSynchronize(any stream)
{
	return ((int (*)(any))real("cudaStreamSynchronize"))(stream);
}
"""
USER = """
#include <stddef.h>
int cudaMalloc(void **, size_t);
int cudaStreamSynchronize(void *);
int main(void)
{
	void *out;

	for (int i = 0; i < 40; i++)
		cudaMalloc(&out, 1000);
	cudaMalloc(&out, 77);
	for (int i = 0; i < 9; i++)
		cudaStreamSynchronize(0);
	return 0;
}
"""
MODES = [mode for mode in ProbeMode if mode is not ProbeMode.AUTO]
DIRECT, JUMPING, FAILING, CALLING, BOTH = 3, 29, 2, 31, 37
LAUNCHES = DIRECT + JUMPING + FAILING + CALLING + BOTH


@dataclass
class Run:
    """What was seen of one run of the program."""

    pid: int
    traced: Traced

    def count(self, source, op):
        return self.traced.count(self.pid, source, op)

    def calls(self, source, op, *rings):
        return self.traced.calls(self.pid, source, op, *rings)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "library.c").write_text(LIBRARY)
    (folder / "program.c").write_text(PROGRAM)
    library, program = folder / "libcudart.so.13", folder / "program"
    subprocess.run(
        [*CC, "-shared", "-fPIC", folder / "library.c", f"-Wl,-soname,{library.name}", "-o", library],
        check=True,
    )  # fmt: skip
    subprocess.run(
        [*CC, folder / "program.c", library, f"-Wl,-rpath,{folder}", "-o", program], check=True
    )
    return library, program


@pytest.fixture(params=MODES)
def run(request, built, start_engine, read, target_of):
    library, program = built
    settings = EngineSettings(host_probes=(), keep_first=1 << 20, probe_mode=request.param)
    engine = start_engine(settings, attach=False)
    assert engine.attach(target_of(library))
    with subprocess.Popen([program]) as process:
        assert process.wait() == 0
    traced = read(engine, [])
    assert not traced.losses["unmatched"]
    assert not traced.losses["too_deep"]
    return Run(process.pid, traced)


def test_a_launch_under_two_names_is_one_launch_with_what_it_returned(run):
    count = run.count(Source.CUDA, CudaOp.LAUNCH_KERNEL)
    assert [int(count[name]) for name in ("entered", "seen", "emitted")] == [LAUNCHES] * 3
    assert (count["nested"], count["errors"], count["hist"].sum()) == (0, FAILING, LAUNCHES)
    rings = "calls", "kept_calls", "failed_calls"
    launches = run.calls(Source.CUDA, CudaOp.LAUNCH_KERNEL, *rings)
    assert len(launches) == LAUNCHES
    assert set(launches["depth"]) == {0}
    assert not (launches["flags"] & Flag.NESTED).any()
    failed = run.calls(Source.CUDA, CudaOp.LAUNCH_KERNEL, "failed_calls")
    assert failed["rc"].tolist() == [98, 98]
    # What the inner one calls lies directly in the one that counts.
    waits = run.calls(Source.DRIVER, DriverOp.STREAM_SYNC)
    assert len(waits) == LAUNCHES - CALLING
    assert set(waits["depth"]) == {1}
    assert (waits["flags"] & Flag.NESTED).all()


def test_a_replay_of_a_graph_is_that_of_the_runtime_or_of_the_driver(run):
    count = run.count(Source.CUDA_GRAPH, GraphOp.LAUNCH)
    assert (count["seen"], count["nested"], count["errors"]) == (17, 0, 1)
    assert run.calls(Source.CUDA_GRAPH, GraphOp.LAUNCH, "failed_calls")["rc"].tolist() == [700]
    replays = run.calls(Source.CUDA_GRAPH, GraphOp.LAUNCH)
    # The runtime's own handle, not that which it hands on.
    assert (replays["handle"][:11] - replays["stream"][:11]).tolist() == [1] * 11
    assert (replays["handle"] == replays["stream"]).tolist() == [False] * 11 + [True] * 5


def test_the_outer_call_has_the_bytes(run):
    pinned = run.calls(Source.CUDA, CudaOp.HOST_ALLOC)
    assert pinned["bytes"].tolist() == [64] * 7
    assert pinned["handle"].tolist() == [65] * 7
    copies = run.count(Source.CUDA, CudaOp.MEMCPY_3D)
    assert (copies["seen"], copies["bytes"]) == (17, 17 * 7 * 5 * 3)
    by_direction = run.traced.copies[CopyKind.HOST_TO_DEVICE]
    assert (by_direction["seen"], by_direction["bytes"]) == (17, 17 * 7 * 5 * 3)


def test_a_call_with_another_operation_between_is_one_of_its_own(run):
    count = run.count(Source.CUDA, CudaOp.MALLOC)
    assert (count["seen"], count["nested"]) == (26, 13)
    between = run.count(Source.DRIVER, DriverOp.MEM_ALLOC)
    assert (between["seen"], between["nested"]) == (13, 13)
    assert sorted(run.calls(Source.CUDA, CudaOp.MALLOC)["depth"]) == [0] * 13 + [2] * 13


@pytest.fixture(params=MODES)
def run_of_two_libraries(request, tmp_path, start_engine, read, target_of):
    for name in ("real", "stand_in", "user"):
        (tmp_path / f"{name}.c").write_text(globals()[name.upper()])
    real, stand_in, user = (
        tmp_path / name for name in ("libcudart.so.13.0", "libcudart.so.13", "user")
    )
    shared = *CC, "-shared", "-fPIC"
    subprocess.run([*shared, tmp_path / "real.c", "-o", real], check=True)
    subprocess.run(
        [*shared, f'-DREAL="{real}"', tmp_path / "stand_in.c", "-ldl", "-o", stand_in], check=True
    )
    subprocess.run(
        [*CC, tmp_path / "user.c", stand_in, f"-Wl,-rpath,{tmp_path}", "-o", user], check=True
    )
    settings = EngineSettings(host_probes=(), keep_first=1 << 20, probe_mode=request.param)
    engine = start_engine(settings, attach=False)
    assert engine.attach(target_of(real))
    assert engine.attach(target_of(stand_in))
    with subprocess.Popen([user]) as process:
        assert process.wait() == 0
    traced = read(engine, [])
    assert not traced.losses["unmatched"]
    return Run(process.pid, traced)


def test_a_call_that_a_library_hands_on_to_another_under_the_same_name_is_one(run_of_two_libraries):
    run = run_of_two_libraries
    count = run.count(Source.CUDA, CudaOp.MALLOC)
    assert [int(count[name]) for name in ("seen", "nested", "errors")] == [41, 0, 1]
    assert count["bytes"] == 40 * 1000
    assert run.count(Source.CUDA, CudaOp.STREAM_SYNC)["seen"] == 9
    failed = run.calls(Source.CUDA, CudaOp.MALLOC, "failed_calls")
    assert failed["rc"].tolist() == [2]
