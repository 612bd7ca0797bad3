/* libcudart: the runtime API, over libcuda as the real one is. */
#include "sim.h"

#include <stdlib.h>

int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, sim_stream_t, void **,
		   void **);
int cuLibraryLoadData(const void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
int cuLibraryGetKernel(void **, const void *, const char *);
int cuMemAlloc_v2(u64 *, size_t);
int cuMemFree_v2(u64);
int cuStreamCreate(sim_stream_t *, unsigned);
int cuEventCreate(sim_event_t *, unsigned);
int cuEventRecord(sim_event_t, sim_stream_t);
int cuEventQuery(sim_event_t);
int cuEventSynchronize(sim_event_t);

struct sim_graph {
	u64 kernels;
};

#define CUDA_VERSION 12090
#define RELEASE_THRESHOLD 4 /* cudaMemPoolAttrReleaseThreshold (driver_types.h) */

/* cudaExtent and what of cudaMemcpy3DParms comes before and after it (driver_types.h). */
struct sim_copy_3d {
	char before[128];
	size_t width, height, depth;
	int kind;
};

static _Thread_local int device;
static struct sim_graph *capturing; /* one capture at a time is enough here */

static int launch(const void *function, struct sim_dim3 grid, struct sim_dim3 block, void **args, size_t smem,
		  sim_stream_t stream)
{
	if (capturing) {
		capturing->kernels++;
		return SIM_SUCCESS;
	}
	return cuLaunchKernel((void *)function, grid.x, grid.y, grid.z, block.x, block.y, block.z, smem, stream, args,
			      NULL);
}

#define LAUNCH(name)                                                                                                   \
	API int name(const void *function, struct sim_dim3 grid, struct sim_dim3 block, void **args, size_t smem,      \
		     sim_stream_t stream)                                                                              \
	{                                                                                                              \
		return launch(function, grid, block, args, smem, stream);                                              \
	}
LAUNCH(cudaLaunchKernel)
LAUNCH(cudaLaunchKernel_ptsz)
LAUNCH(__cudaLaunchKernel)
LAUNCH(cudaLaunchCooperativeKernel)

API int cudaLaunchKernelExC(const struct sim_launch_config *config, const void *function, void **args)
{
	return launch(function, config->grid, config->block, args, config->smem, config->stream);
}

API int cudaMalloc(void **address, size_t bytes)
{
	return cuMemAlloc_v2((u64 *)address, bytes);
}

API int cudaFree(void *address)
{
	return cuMemFree_v2((u64)address);
}

API int cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height)
{
	*pitch = width;
	return sim_allocate((u64 *)address, width * height);
}

API int cudaMallocManaged(void **address, size_t bytes, unsigned flags)
{
	return flags ? sim_allocate((u64 *)address, bytes) : SIM_INVALID_VALUE;
}

API int cudaMallocAsync(void **address, size_t bytes, sim_stream_t stream)
{
	(void)stream;
	return sim_pool_allocate((u64 *)address, bytes);
}

API int cudaFreeAsync(void *address, sim_stream_t stream)
{
	(void)stream;
	return sim_pool_release((u64)address);
}

/* There is one pool. */
API int cudaDeviceGetDefaultMemPool(void **pool, int number)
{
	static char the_pool;

	if (number < 0 || (u64)number >= sim_setting("DEVICES", 8))
		return SIM_INVALID_DEVICE;
	*pool = &the_pool;
	return SIM_SUCCESS;
}

API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value)
{
	if (!pool || !value || attribute != RELEASE_THRESHOLD)
		return SIM_INVALID_VALUE;
	sim_pool_keep(*(u64 *)value);
	return SIM_SUCCESS;
}

API int cudaMemPoolTrimTo(void *pool, size_t keep_bytes)
{
	if (!pool)
		return SIM_INVALID_VALUE;
	sim_pool_trim(keep_bytes);
	return SIM_SUCCESS;
}

API int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
	*free_bytes = sim_free_bytes();
	*total_bytes = sim_setting("MEMORY_BYTES", 8ull << 30);
	return SIM_SUCCESS;
}

API int cudaMallocHost(void **address, size_t bytes)
{
	return sim_allocate((u64 *)address, bytes);
}

API int cudaHostAlloc(void **address, size_t bytes, unsigned flags)
{
	(void)flags;
	return sim_allocate((u64 *)address, bytes);
}

API int cudaFreeHost(void *address)
{
	return sim_release((u64)address);
}

static int copy(size_t bytes, sim_stream_t stream, int wait)
{
	sim_stream_push(stream, sim_copy_ns(bytes));
	if (wait)
		sim_stream_wait(stream);
	return SIM_SUCCESS;
}

API int cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
	return to && from && kind >= 0 && kind <= 4 ? copy(bytes, NULL, 1) : SIM_INVALID_VALUE;
}

API int cudaMemcpy_ptds(void *to, const void *from, size_t bytes, int kind)
{
	return to && from && kind >= 0 && kind <= 4 ? copy(bytes, NULL, 1) : SIM_INVALID_VALUE;
}

API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, sim_stream_t stream)
{
	return to && from && kind >= 0 && kind <= 4 ? copy(bytes, stream, 0) : SIM_INVALID_VALUE;
}

API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind)
{
	(void)kind;
	return to && from && to_pitch >= width && from_pitch >= width ? copy(width * height, NULL, 1) : SIM_INVALID_VALUE;
}

API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
			  int kind, sim_stream_t stream)
{
	(void)kind;
	return to && from && to_pitch >= width && from_pitch >= width ? copy(width * height, stream, 0)
								      : SIM_INVALID_VALUE;
}

API int cudaMemcpy3D(const struct sim_copy_3d *p)
{
	return copy(p->width * p->height * p->depth, NULL, 1);
}

API int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes)
{
	(void)to_device, (void)from_device;
	return to && from ? copy(bytes, NULL, 1) : SIM_INVALID_VALUE;
}

API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, sim_stream_t stream)
{
	(void)to_device, (void)from_device;
	return to && from ? copy(bytes, stream, 0) : SIM_INVALID_VALUE;
}

API int cudaMemset(void *to, int value, size_t bytes)
{
	(void)value;
	return to ? copy(bytes, NULL, 0) : SIM_INVALID_VALUE;
}

API int cudaMemsetAsync(void *to, int value, size_t bytes, sim_stream_t stream)
{
	(void)value;
	return to ? copy(bytes, stream, 0) : SIM_INVALID_VALUE;
}

API int cudaStreamCreate(sim_stream_t *stream)
{
	return cuStreamCreate(stream, 0);
}

API int cudaStreamSynchronize(sim_stream_t stream)
{
	sim_stream_wait(stream);
	return SIM_SUCCESS;
}

API int cudaDeviceSynchronize(void)
{
	sim_stream_wait(NULL);
	return SIM_SUCCESS;
}

API int cudaStreamQuery(sim_stream_t stream)
{
	return sim_stream_is_done(stream) ? SIM_SUCCESS : SIM_NOT_READY;
}

API int cudaEventCreate(sim_event_t *event)
{
	return cuEventCreate(event, 0);
}

API int cudaEventRecord(sim_event_t event, sim_stream_t stream)
{
	return cuEventRecord(event, stream);
}

API int cudaEventQuery(sim_event_t event)
{
	return cuEventQuery(event);
}

API int cudaEventSynchronize(sim_event_t event)
{
	return cuEventSynchronize(event);
}

API int cudaStreamWaitEvent(sim_stream_t stream, sim_event_t event, unsigned flags)
{
	(void)flags;
	sim_stream_follow(stream, event);
	return SIM_SUCCESS;
}

API int cudaSetDevice(int number)
{
	if (number < 0 || (u64)number >= sim_setting("DEVICES", 8))
		return SIM_INVALID_DEVICE;
	device = number;
	return SIM_SUCCESS;
}

/* A wait sleeps here whatever is asked for. */
API int cudaSetDeviceFlags(unsigned flags)
{
	(void)flags;
	return SIM_SUCCESS;
}

API const char *cudaGetErrorString(int error)
{
	switch (error) {
	case SIM_SUCCESS:
		return "no error";
	case SIM_INVALID_VALUE:
		return "invalid argument";
	case SIM_OUT_OF_MEMORY:
		return "out of memory";
	case SIM_INVALID_DEVICE:
		return "invalid device ordinal";
	case SIM_NOT_FOUND:
		return "named symbol not found";
	case SIM_NOT_READY:
		return "device not ready";
	default:
		return "unrecognized error code";
	}
}

API int cudaDriverGetVersion(int *version)
{
	*version = CUDA_VERSION;
	return SIM_SUCCESS;
}

API int cudaRuntimeGetVersion(int *version)
{
	*version = CUDA_VERSION;
	return SIM_SUCCESS;
}

API int cudaLibraryLoadData(const void **library, const void *code, void *jit_options, void **jit_values, unsigned n_jit,
			    void *options, void **values, unsigned n_options)
{
	return cuLibraryLoadData(library, code, jit_options, jit_values, n_jit, options, values, n_options);
}

API int cudaLibraryGetKernel(void **kernel, const void *library, const char *name)
{
	return cuLibraryGetKernel(kernel, library, name);
}

API int cudaGetDevice(int *number)
{
	*number = device;
	return SIM_SUCCESS;
}

API int cudaStreamBeginCapture(sim_stream_t stream, int mode)
{
	(void)stream, (void)mode;
	if (capturing)
		return SIM_INVALID_VALUE;
	capturing = calloc(1, sizeof(*capturing));
	return SIM_SUCCESS;
}

API int cudaStreamEndCapture(sim_stream_t stream, struct sim_graph **graph)
{
	(void)stream;
	if (!capturing)
		return SIM_INVALID_VALUE;
	*graph = capturing;
	capturing = NULL;
	return SIM_SUCCESS;
}

static int instantiate(struct sim_graph **exec, struct sim_graph *graph)
{
	if (!graph)
		return SIM_INVALID_VALUE;
	*exec = calloc(1, sizeof(**exec));
	(*exec)->kernels = graph->kernels;
	return SIM_SUCCESS;
}

API int cudaGraphInstantiate(struct sim_graph **exec, struct sim_graph *graph, unsigned long long flags)
{
	(void)flags;
	return instantiate(exec, graph);
}

API int cudaGraphInstantiateWithFlags(struct sim_graph **exec, struct sim_graph *graph, unsigned long long flags)
{
	(void)flags;
	return instantiate(exec, graph);
}

API int cudaGraphLaunch(struct sim_graph *exec, sim_stream_t stream)
{
	sim_kernels_push(stream, exec->kernels);
	return SIM_SUCCESS;
}

API int cudaGraphDestroy(struct sim_graph *graph)
{
	free(graph);
	return SIM_SUCCESS;
}

API int cudaGraphExecDestroy(struct sim_graph *exec)
{
	free(exec);
	return SIM_SUCCESS;
}
