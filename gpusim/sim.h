/* gpusim: a GPU that is a clock.
 *
 * Our own small libcudart, libcuda and libnccl with the prototypes of the public headers (CUDA 12.9, NCCL 2.28). No
 * memory is copied and nothing is computed. A stream is the time until which it is busy: launches and copies move that
 * time on, and a wait sleeps until it. A stream holds one unfinished collective: the next call on it waits. Device memory is an address range with a first-fit allocator, so it runs out and
 * fragments as a real one does. Settings come from the environment, GPUSIM_<NAME>: MEMORY_BYTES, KERNEL_NS, COPY_MB_PER_S,
 * WIRE_MB_PER_S, DEVICES, HOST, and four that are off unless set:
 *
 * CONTEXT_NS: what the first allocation, copy or launch of a process takes longer: it makes the context.
 * FIRST_LAUNCH_NS: what the first launch of each function in a process takes longer: it loads the module.
 * MAP_MB_PER_S: how fast the pool of cudaMallocAsync gets memory that it does not hold yet.
 * SHARED_DEVICE_FD: a descriptor of shared memory (memfd_create), inherited by every process that is to use one device
 * with the others: the kernels of all of them run one after another, in the order of their launches. Without it a
 * process has a device of its own.
 *
 * No code is run. A kernel of a library that was loaded (cudaLibraryLoadData) takes as long as its first argument says, a
 * u64 of ns; every other one takes KERNEL_NS.
 */
#ifndef GPUSIM_H
#define GPUSIM_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default"), noinline))

typedef uint64_t u64;

/* cudaError_t, CUresult: the values that the simulator returns mean the same in both. */
enum {
	SIM_SUCCESS = 0,
	SIM_INVALID_VALUE = 1,
	SIM_OUT_OF_MEMORY = 2,
	SIM_INVALID_DEVICE = 101,
	SIM_INVALID_CONTEXT = 201,
	SIM_NOT_FOUND = 500,
	SIM_NOT_READY = 600,
};

typedef struct sim_stream *sim_stream_t;
typedef struct sim_event *sim_event_t;

struct sim_dim3 {
	unsigned x, y, z;
};

struct sim_launch_config {
	struct sim_dim3 grid, block;
	size_t smem;
	sim_stream_t stream;
	void *attributes;
	unsigned n_attributes;
};

struct sim_driver_launch_config {
	unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem;
	sim_stream_t stream;
	void *attributes;
	unsigned n_attributes;
};

/* libcuda's inside, for libcudart and libnccl. */
u64 sim_now_ns(void);
void sim_sleep_until(u64 mono_ns);
u64 sim_setting(const char *name, u64 otherwise);
u64 sim_stream_busy_until(sim_stream_t stream);
void sim_stream_push(sim_stream_t stream, u64 duration_ns);
/* What comes on the stream begins when the event has happened. */
void sim_stream_follow(sim_stream_t stream, sim_event_t event);
/* Kernels, which wait for those of other processes where the device is shared. */
void sim_kernels_push(sim_stream_t stream, u64 n_kernels);
/* Register something to wait for before a stream's time is known; `wait` returns the time at which it was done. */
void sim_stream_defer(sim_stream_t stream, u64 (*wait)(void *), void *what);
void sim_stream_wait(sim_stream_t stream);
int sim_stream_is_done(sim_stream_t stream);
u64 sim_copy_ns(size_t bytes);
int sim_allocate(u64 *address, size_t bytes);
int sim_release(u64 address);
u64 sim_free_bytes(void);
/* The same from a pool, which keeps what is released: until the next wait for a stream, or as much as its threshold says. */
int sim_pool_allocate(u64 *address, size_t bytes);
int sim_pool_release(u64 address);
void sim_pool_keep(u64 threshold_bytes);
void sim_pool_trim(u64 keep_bytes);

#endif
