/* libcuda: the device's clock and memory, and the driver API. */
#include "sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct deferred {
	u64 (*wait)(void *);
	void *what;
	struct deferred *next;
};

struct sim_stream {
	u64 busy_until;
	struct deferred *first, *last;
};

struct sim_event {
	u64 done_at;
};

struct block {
	u64 address, bytes;
	struct block *next;
};

struct function {
	void *at;
	struct function *next;
};

/* Of a library that was loaded; its address is its handle. */
struct kernel {
	struct kernel *next;
};

#define SHARED_BYTES 4096
#define FIRST_ADDRESS 0x7f0000000000ull
#define ALIGNMENT 512
#define FIRST_CONTEXT 0xc0de0000ull

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_stream default_stream;
static struct block *blocks; /* live allocations, by address */
static struct function *loaded; /* launched before, while FIRST_LAUNCH_NS is set */
static struct kernel *kernels; /* grows at its head, and nothing is taken from it */
static u64 pool_held, pool_used, pool_threshold; /* bytes */
static pthread_once_t context = PTHREAD_ONCE_INIT, sharing = PTHREAD_ONCE_INIT;
static u64 *device_busy_until; /* of all processes; NULL where the device is not shared */

u64 sim_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (u64)now.tv_sec * 1000000000ull + now.tv_nsec;
}

void sim_sleep_until(u64 mono_ns)
{
	struct timespec until = {.tv_sec = mono_ns / 1000000000ull, .tv_nsec = mono_ns % 1000000000ull};

	if (sim_now_ns() < mono_ns)
		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL))
			;
}

u64 sim_setting(const char *name, u64 otherwise)
{
	char key[64];
	const char *text;

	snprintf(key, sizeof(key), "GPUSIM_%s", name);
	text = getenv(key);
	return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static sim_stream_t real(sim_stream_t stream)
{
	/* 0, cudaStreamLegacy (1) and cudaStreamPerThread (2) are one stream here. */
	return (u64)stream < 16 ? &default_stream : stream;
}

static void settle(sim_stream_t stream)
{
	while (stream->first) {
		struct deferred *item = stream->first;
		u64 done_at;

		stream->first = item->next;
		if (!stream->first)
			stream->last = NULL;
		done_at = item->wait(item->what);
		if (done_at > stream->busy_until)
			stream->busy_until = done_at;
		free(item);
	}
}

u64 sim_stream_busy_until(sim_stream_t stream)
{
	u64 now = sim_now_ns();

	stream = real(stream);
	settle(stream);
	return stream->busy_until > now ? stream->busy_until : now;
}

static void make_context(void)
{
	sim_sleep_until(sim_now_ns() + sim_setting("CONTEXT_NS", 0));
}

void sim_stream_push(sim_stream_t stream, u64 duration_ns)
{
	u64 from;

	pthread_once(&context, make_context);
	from = sim_stream_busy_until(stream);
	real(stream)->busy_until = from + duration_ns;
}

static void share_device(void)
{
	int fd = sim_setting("SHARED_DEVICE_FD", 0);
	void *shared = MAP_FAILED;

	if (!fd)
		return;
	if (!ftruncate(fd, SHARED_BYTES))
		shared = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (shared == MAP_FAILED) {
		perror("GPUSIM_SHARED_DEVICE_FD");
		abort();
	}
	device_busy_until = shared;
}

static void push_busy(sim_stream_t stream, u64 duration_ns)
{
	u64 queued_until, from;

	pthread_once(&sharing, share_device);
	if (!device_busy_until) {
		sim_stream_push(stream, duration_ns);
		return;
	}
	pthread_once(&context, make_context);
	from = sim_stream_busy_until(stream);
	queued_until = __atomic_load_n(device_busy_until, __ATOMIC_ACQUIRE);
	do {
		if (queued_until > from)
			from = queued_until;
	} while (!__atomic_compare_exchange_n(device_busy_until, &queued_until, from + duration_ns, 0,
					      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	real(stream)->busy_until = from + duration_ns;
}

void sim_kernels_push(sim_stream_t stream, u64 n_kernels)
{
	push_busy(stream, n_kernels * sim_setting("KERNEL_NS", 20000));
}

void sim_stream_defer(sim_stream_t stream, u64 (*wait)(void *), void *what)
{
	struct deferred *item = calloc(1, sizeof(*item));

	stream = real(stream);
	item->wait = wait;
	item->what = what;
	if (stream->last)
		stream->last->next = item;
	else
		stream->first = item;
	stream->last = item;
}

void sim_stream_wait(sim_stream_t stream)
{
	sim_sleep_until(sim_stream_busy_until(stream));
	sim_pool_trim(pool_threshold);
}

int sim_stream_is_done(sim_stream_t stream)
{
	return sim_now_ns() >= sim_stream_busy_until(stream);
}

u64 sim_copy_ns(size_t bytes)
{
	return bytes * 1000 / sim_setting("COPY_MB_PER_S", 12000);
}

static u64 whole_units(u64 bytes)
{
	return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* First fit between live blocks. */
int sim_allocate(u64 *address, size_t bytes)
{
	u64 end = FIRST_ADDRESS + sim_setting("MEMORY_BYTES", 8ull << 30), at = FIRST_ADDRESS;
	struct block **link = &blocks, *made;

	if (!address || !bytes)
		return SIM_INVALID_VALUE;
	pthread_once(&context, make_context);
	bytes = whole_units(bytes);
	pthread_mutex_lock(&lock);
	for (; *link; link = &(*link)->next) {
		if ((*link)->address - at >= bytes)
			break;
		at = (*link)->address + (*link)->bytes;
	}
	if (at + bytes > end) {
		pthread_mutex_unlock(&lock);
		return SIM_OUT_OF_MEMORY;
	}
	made = calloc(1, sizeof(*made));
	made->address = at;
	made->bytes = bytes;
	made->next = *link;
	*link = made;
	pthread_mutex_unlock(&lock);
	*address = at;
	return SIM_SUCCESS;
}

/* Take a block out; returns its bytes, 0 where there is none. */
static u64 take(u64 address)
{
	struct block **link = &blocks, *found = NULL;
	u64 bytes;

	pthread_mutex_lock(&lock);
	for (; *link; link = &(*link)->next) {
		if ((*link)->address == address) {
			found = *link;
			*link = found->next;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	bytes = found ? found->bytes : 0;
	free(found);
	return bytes;
}

int sim_release(u64 address)
{
	return !address || take(address) ? SIM_SUCCESS : SIM_INVALID_VALUE;
}

u64 sim_free_bytes(void)
{
	u64 bytes = sim_setting("MEMORY_BYTES", 8ull << 30);

	pthread_mutex_lock(&lock);
	for (struct block *block = blocks; block; block = block->next)
		bytes -= block->bytes;
	pthread_mutex_unlock(&lock);
	return bytes;
}

int sim_pool_allocate(u64 *address, size_t bytes)
{
	u64 rate = sim_setting("MAP_MB_PER_S", 0), missing;
	int rc = sim_allocate(address, bytes);

	if (rc)
		return rc;
	pthread_mutex_lock(&lock);
	pool_used += whole_units(bytes);
	missing = pool_used > pool_held ? pool_used - pool_held : 0;
	pool_held += missing;
	pthread_mutex_unlock(&lock);
	if (rate && missing)
		sim_sleep_until(sim_now_ns() + missing * 1000 / rate);
	return SIM_SUCCESS;
}

int sim_pool_release(u64 address)
{
	u64 bytes = take(address);

	pthread_mutex_lock(&lock);
	pool_used -= bytes < pool_used ? bytes : pool_used; /* a block of cudaMalloc may be released here too */
	pthread_mutex_unlock(&lock);
	return bytes ? SIM_SUCCESS : SIM_INVALID_VALUE;
}

void sim_pool_trim(u64 keep_bytes)
{
	pthread_mutex_lock(&lock);
	if (keep_bytes < pool_used)
		keep_bytes = pool_used;
	if (pool_held > keep_bytes)
		pool_held = keep_bytes;
	pthread_mutex_unlock(&lock);
}

void sim_pool_keep(u64 threshold_bytes)
{
	pool_threshold = threshold_bytes;
}

static void load(void *function)
{
	u64 cost_ns = sim_setting("FIRST_LAUNCH_NS", 0);
	struct function *known;

	if (!cost_ns)
		return;
	pthread_mutex_lock(&lock);
	for (known = loaded; known && known->at != function; known = known->next)
		;
	if (!known) {
		struct function *made = calloc(1, sizeof(*made));

		made->at = function;
		made->next = loaded;
		loaded = made;
	}
	pthread_mutex_unlock(&lock);
	if (!known)
		sim_sleep_until(sim_now_ns() + cost_ns);
}

static int is_of_library(const void *function)
{
	struct kernel *kernel = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE);

	while (kernel && kernel != function)
		kernel = kernel->next;
	return kernel != NULL;
}

static int push_kernel(void *function, void **args, sim_stream_t stream)
{
	load(function);
	if (!is_of_library(function))
		sim_kernels_push(stream, 1);
	else if (args)
		push_busy(stream, *(u64 *)args[0]);
	else
		return SIM_INVALID_VALUE;
	return SIM_SUCCESS;
}

/* A library is the text it was loaded from, which the caller keeps. */
API int cuLibraryLoadData(const void **library, const void *code, void *jit_options, void **jit_values, unsigned n_jit,
			  void *options, void **values, unsigned n_options)
{
	(void)jit_options, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n_options;
	if (!library || !code)
		return SIM_INVALID_VALUE;
	*library = code;
	return SIM_SUCCESS;
}

API int cuLibraryGetKernel(void **kernel, const void *library, const char *name)
{
	struct kernel *made;

	if (!kernel || !library || !name)
		return SIM_INVALID_VALUE;
	if (!strstr(library, name))
		return SIM_NOT_FOUND;
	made = calloc(1, sizeof(*made));
	made->next = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE);
	while (!__atomic_compare_exchange_n(&kernels, &made->next, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	*kernel = made;
	return SIM_SUCCESS;
}

API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
		       unsigned block_y, unsigned block_z, unsigned smem, sim_stream_t stream, void **args, void **extra)
{
	(void)smem, (void)extra;
	if (!function || !grid_x || !grid_y || !grid_z || (u64)block_x * block_y * block_z > 1024)
		return SIM_INVALID_VALUE;
	return push_kernel(function, args, stream);
}

API int cuLaunchKernelEx(const struct sim_driver_launch_config *config, void *function, void **args, void **extra)
{
	(void)extra;
	return config && function ? push_kernel(function, args, config->stream) : SIM_INVALID_VALUE;
}

API int cuMemAlloc_v2(u64 *address, size_t bytes)
{
	return sim_allocate(address, bytes);
}

API int cuMemFree_v2(u64 address)
{
	return sim_release(address);
}

API int cuMemAllocManaged(u64 *address, size_t bytes, unsigned flags)
{
	return flags ? sim_allocate(address, bytes) : SIM_INVALID_VALUE;
}

API int cuMemAllocAsync(u64 *address, size_t bytes, sim_stream_t stream)
{
	(void)stream;
	return sim_allocate(address, bytes);
}

API int cuMemFreeAsync(u64 address, sim_stream_t stream)
{
	(void)stream;
	return sim_release(address);
}

API int cuMemCreate(u64 *handle, size_t bytes, const void *properties, u64 flags)
{
	(void)properties, (void)flags;
	return sim_allocate(handle, bytes);
}

API int cuMemRelease(u64 handle)
{
	return sim_release(handle);
}

static int copy_now(size_t bytes)
{
	sim_stream_push(NULL, sim_copy_ns(bytes));
	sim_stream_wait(NULL);
	return SIM_SUCCESS;
}

API int cuMemcpyHtoD_v2(u64 to, const void *from, size_t bytes)
{
	return to && from ? copy_now(bytes) : SIM_INVALID_VALUE;
}

API int cuMemcpyDtoH_v2(void *to, u64 from, size_t bytes)
{
	return to && from ? copy_now(bytes) : SIM_INVALID_VALUE;
}

API int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, sim_stream_t stream)
{
	if (!to || !from)
		return SIM_INVALID_VALUE;
	sim_stream_push(stream, sim_copy_ns(bytes));
	return SIM_SUCCESS;
}

API int cuStreamSynchronize(sim_stream_t stream)
{
	sim_stream_wait(stream);
	return SIM_SUCCESS;
}

API int cuLinkAddData_v2(void *link, int type, const void *data, size_t size, const char *name, unsigned n_options,
			 const void *options, const void *values)
{
	(void)link, (void)type, (void)data, (void)size, (void)name, (void)n_options, (void)options, (void)values;
	return SIM_SUCCESS;
}

API int cuLinkComplete(void *link, const void **image, size_t *size)
{
	*image = link;
	*size = sizeof(link);
	return SIM_SUCCESS;
}

/* A device's own context; the runtime here needs none. */
API int cuDevicePrimaryCtxRetain(void **opened, int number)
{
	if (number < 0 || (u64)number >= sim_setting("DEVICES", 8))
		return SIM_INVALID_DEVICE;
	*opened = (void *)(FIRST_CONTEXT + number);
	return SIM_SUCCESS;
}

API int cuCtxSetCurrent(void *opened)
{
	if (opened && (u64)opened - FIRST_CONTEXT >= sim_setting("DEVICES", 8))
		return SIM_INVALID_CONTEXT;
	return SIM_SUCCESS;
}

API int cuCtxSynchronize(void)
{
	sim_stream_wait(NULL);
	return SIM_SUCCESS;
}

API int cuEventSynchronize(sim_event_t event)
{
	if (!event)
		return SIM_INVALID_VALUE;
	sim_sleep_until(event->done_at);
	return SIM_SUCCESS;
}

API int cuStreamCreate(sim_stream_t *stream, unsigned flags)
{
	(void)flags;
	*stream = calloc(1, sizeof(**stream));
	return SIM_SUCCESS;
}

API int cuEventCreate(sim_event_t *event, unsigned flags)
{
	(void)flags;
	*event = calloc(1, sizeof(**event));
	return SIM_SUCCESS;
}

API int cuEventRecord(sim_event_t event, sim_stream_t stream)
{
	event->done_at = sim_stream_busy_until(stream);
	return SIM_SUCCESS;
}

void sim_stream_follow(sim_stream_t stream, sim_event_t event)
{
	u64 until = sim_stream_busy_until(stream);

	real(stream)->busy_until = event->done_at > until ? event->done_at : until;
}

API int cuEventQuery(sim_event_t event)
{
	return sim_now_ns() >= event->done_at ? SIM_SUCCESS : SIM_NOT_READY;
}
