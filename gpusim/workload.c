/* The workloads: small programs on the simulator that keep their own account of every call.
 *
 * Usage: workload NAME [key=value ...]. At the end one JSON object on stdout: the calls by name, with bytes, errors and
 * the time inside by our own clock, and what identifies the communicators. That account never passes through a probe.
 * Functions are not static: what is linked keeps the names of exported ones alone, and stacks are shown by them.
 */
#include "sim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct unique_id {
	char bytes[128];
};

struct copy_3d {
	char before[128];
	size_t width, height, depth;
	int kind;
};

typedef struct sim_comm *comm_t;
typedef struct sim_graph *graph_t;

int cudaLaunchKernel(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int cudaLaunchKernel_ptsz(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int __cudaLaunchKernel(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int cudaLaunchCooperativeKernel(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int cudaLaunchKernelExC(const struct sim_launch_config *, const void *, void **);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocPitch(void **, size_t *, size_t, size_t);
int cudaMallocManaged(void **, size_t, unsigned);
int cudaMallocAsync(void **, size_t, sim_stream_t);
int cudaFreeAsync(void *, sim_stream_t);
int cudaMallocHost(void **, size_t);
int cudaHostAlloc(void **, size_t, unsigned);
int cudaFreeHost(void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, sim_stream_t);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, sim_stream_t);
int cudaMemcpy3D(const struct copy_3d *);
int cudaMemcpyPeer(void *, int, const void *, int, size_t);
int cudaMemcpyPeerAsync(void *, int, const void *, int, size_t, sim_stream_t);
int cudaMemset(void *, int, size_t);
int cudaMemsetAsync(void *, int, size_t, sim_stream_t);
int cudaStreamCreate(sim_stream_t *);
int cudaStreamSynchronize(sim_stream_t);
int cudaStreamQuery(sim_stream_t);
int cudaDeviceSynchronize(void);
int cudaEventCreate(sim_event_t *);
int cudaEventRecord(sim_event_t, sim_stream_t);
int cudaEventQuery(sim_event_t);
int cudaEventSynchronize(sim_event_t);
int cudaStreamWaitEvent(sim_stream_t, sim_event_t, unsigned);
int cudaSetDevice(int);
int cudaStreamBeginCapture(sim_stream_t, int);
int cudaStreamEndCapture(sim_stream_t, graph_t *);
int cudaGraphInstantiate(graph_t *, graph_t, unsigned long long);
int cudaGraphInstantiateWithFlags(graph_t *, graph_t, unsigned long long);
int cudaGraphLaunch(graph_t, sim_stream_t);
int cudaGraphDestroy(graph_t);
int cudaGraphExecDestroy(graph_t);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, sim_stream_t, void **,
		   void **);
int cuLaunchKernelEx(const struct sim_driver_launch_config *, void *, void **, void **);
int cuMemAlloc_v2(u64 *, size_t);
int cuMemFree_v2(u64);
int cuMemCreate(u64 *, size_t, const void *, u64);
int cuMemRelease(u64);
int cuLinkAddData_v2(void *, int, const void *, size_t, const char *, unsigned, const void *, const void *);
int cuLinkComplete(void *, const void **, size_t *);
int cuMemcpyHtoD_v2(u64, const void *, size_t);
int cuMemcpyHtoDAsync_v2(u64, const void *, size_t, sim_stream_t);
int cuStreamSynchronize(sim_stream_t);
int cuCtxSynchronize(void);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int ncclGetUniqueId(struct unique_id *);
int ncclCommInitRank(comm_t *, int, struct unique_id, int);
int ncclCommInitRankConfig(comm_t *, int, struct unique_id, int, void *);
int ncclCommInitRankScalable(comm_t *, int, int, int, struct unique_id *, void *);
int ncclCommSplit(comm_t, int, int, comm_t *, void *);
int ncclCommUserRank(comm_t, int *);
int ncclCommCount(comm_t, int *);
int ncclCommDestroy(comm_t);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, sim_stream_t);
int ncclReduceScatter(const void *, void *, size_t, int, int, comm_t, sim_stream_t);
int ncclAllGather(const void *, void *, size_t, int, comm_t, sim_stream_t);
int ncclBroadcast(const void *, void *, size_t, int, int, comm_t, sim_stream_t);
int ncclGroupStart(void);
int ncclGroupEnd(void);

/* ── Account ─────────────────────────────────────────────────────────────── */

struct account {
	const char *name;
	u64 calls, bytes, errors, total_ns, max_ns;
};

enum { MAX_NAMES = 96, H2D = 1, D2H = 2, D2D = 3, FLOAT = 7, BFLOAT16 = 9 };

static struct account accounts[MAX_NAMES];
static const char *facts[64][2];
static int n_facts;

u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (u64)now.tv_sec * 1000000000ull + now.tv_nsec;
}

int keep(const char *name, u64 bytes, u64 started_ns, int rc)
{
	u64 spent_ns = now_ns() - started_ns;
	struct account *at = accounts;

	while (at->name && strcmp(at->name, name))
		at++;
	at->name = name;
	at->calls++;
	at->total_ns += spent_ns;
	if (spent_ns > at->max_ns)
		at->max_ns = spent_ns;
	if (rc && rc != SIM_NOT_READY)
		at->errors++;
	else
		at->bytes += bytes;
	return rc;
}

#define CALL(function, bytes, ...)                                                                                     \
	({                                                                                                             \
		u64 started_ns_ = now_ns();                                                                            \
		int rc_ = function(__VA_ARGS__);                                                                       \
		keep(#function, bytes, started_ns_, rc_);                                                              \
	})

void fact(const char *key, const char *format, u64 value)
{
	char *text = malloc(64);

	snprintf(text, 64, format, value);
	facts[n_facts][0] = key;
	facts[n_facts++][1] = text;
}

void print_account(const char *workload, u64 started_ns)
{
	printf("{\"workload\": \"%s\", \"pid\": %d, \"elapsed_ns\": %llu", workload, getpid(),
	       (unsigned long long)(now_ns() - started_ns));
	for (int i = 0; i < n_facts; i++)
		printf(", \"%s\": %s", facts[i][0], facts[i][1]);
	printf(", \"calls\": {");
	for (struct account *at = accounts; at->name; at++)
		printf("%s\"%s\": {\"calls\": %llu, \"bytes\": %llu, \"errors\": %llu, \"total_ns\": %llu, \"max_ns\": %llu}",
		       at == accounts ? "" : ", ", at->name, (unsigned long long)at->calls, (unsigned long long)at->bytes,
		       (unsigned long long)at->errors, (unsigned long long)at->total_ns, (unsigned long long)at->max_ns);
	printf("}}\n");
	fflush(stdout);
}

/* ── Knobs ───────────────────────────────────────────────────────────────── */

static int n_arguments;
static char **arguments;

u64 knob(const char *name, u64 otherwise)
{
	size_t length = strlen(name);

	for (int i = 2; i < n_arguments; i++)
		if (!strncmp(arguments[i], name, length) && arguments[i][length] == '=')
			return strtoull(arguments[i] + length + 1, NULL, 0);
	return otherwise;
}

u64 from_environment(const char *name, u64 otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

void spin(u64 duration_ns)
{
	u64 until = now_ns() + duration_ns;

	while (now_ns() < until)
		;
}

void rest(u64 duration_ns)
{
	sim_sleep_until(now_ns() + duration_ns);
}

static const struct sim_dim3 GRID = {61, 2, 3}, BLOCK = {32, 4, 2};
static void *const KERNEL = (void *)0x401000;
static char buffer[64];

void step(sim_stream_t stream, u64 n_kernels)
{
	for (u64 i = 0; i < n_kernels; i++)
		CALL(cudaLaunchKernel, 0, KERNEL, GRID, BLOCK, NULL, 0, stream);
}

/* ── Single-process workloads ────────────────────────────────────────────── */

void train(void)
{
	u64 steps = knob("steps", 50), batch = knob("batch_bytes", 4 << 20), loader_ns = knob("loader_us", 500) * 1000;
	u64 slow_from = knob("slow_from", steps), slow_ns = knob("slow_us", 5000) * 1000;
	sim_stream_t stream;
	void *input;

	cudaStreamCreate(&stream);
	CALL(cudaMalloc, batch, &input, batch);
	for (u64 i = 0; i < steps; i++) {
		spin(loader_ns);
		if (i >= slow_from)
			rest(slow_ns);
		CALL(cudaMemcpyAsync, batch, input, buffer, batch, H2D, stream);
		step(stream, knob("kernels", 40));
		CALL(cudaStreamSynchronize, 0, stream);
	}
	CALL(cudaFree, batch, input);
}

void infer(void)
{
	u64 requests = knob("requests", 50), tokens = knob("tokens", 16), idle_ns = knob("idle_us", 2000) * 1000;
	void *cache;

	for (u64 i = 0; i < requests; i++) {
		rest(idle_ns);
		CALL(cudaMallocAsync, 1 << 20, &cache, 1 << 20, NULL);
		for (u64 token = 0; token < tokens; token++) {
			step(NULL, knob("kernels", 6));
			CALL(cudaMemcpy, 4096, buffer, cache, 4096, D2H);
		}
		CALL(cudaFreeAsync, 1 << 20, cache, NULL);
	}
}

void leak(void)
{
	u64 steps = knob("steps", 200), bytes = knob("bytes", 8 << 20), one_in = knob("leak_one_in", 4);
	void *block;

	for (u64 i = 0; i < steps; i++) {
		if (CALL(cudaMalloc, bytes, &block, bytes))
			continue;
		step(NULL, 4);
		CALL(cudaDeviceSynchronize, 0);
		if (i % one_in)
			CALL(cudaFree, bytes, block);
	}
}

/* Small live blocks between freed large ones: there is room in total, and none in one piece. */
void fragment(void)
{
	u64 pairs = knob("pairs", 200), large = knob("large_bytes", 8 << 20), small = knob("small_bytes", 1 << 20);
	void **blocks = calloc(pairs, sizeof(*blocks)), *last;

	for (u64 i = 0; i < pairs; i++) {
		CALL(cudaMalloc, large, &blocks[i], large);
		CALL(cudaMalloc, small, &last, small);
	}
	for (u64 i = 0; i < pairs; i++)
		CALL(cudaFree, large, blocks[i]);
	for (u64 i = 0; i < knob("attempts", 5); i++)
		CALL(cudaMalloc, 8ull << 30, &last, knob("wanted_bytes", 7ull << 30));
}

void copy(void)
{
	u64 steps = knob("steps", 30), bytes = knob("bytes", 64 << 20);
	void *device;

	CALL(cudaMalloc, bytes, &device, bytes);
	for (u64 i = 0; i < steps; i++) {
		CALL(cudaMemcpy, bytes, device, buffer, bytes, H2D);
		step(NULL, 2);
		CALL(cudaMemcpy, bytes / 4, buffer, device, bytes / 4, D2H);
	}
	CALL(cudaFree, bytes, device);
}

void synchronise(void)
{
	for (u64 i = 0; i < knob("steps", 300); i++) {
		step(NULL, 1);
		CALL(cudaDeviceSynchronize, 0);
	}
}

void graph(void)
{
	graph_t captured, exec;
	sim_stream_t stream;

	cudaStreamCreate(&stream);
	CALL(cudaStreamBeginCapture, 0, stream, 1);
	step(stream, knob("kernels", 50));
	CALL(cudaStreamEndCapture, 0, stream, &captured);
	CALL(cudaGraphInstantiateWithFlags, 0, &exec, captured, 0);
	fact("exec", "%llu", (u64)exec);
	fact("stream", "%llu", (u64)stream);
	for (u64 i = 0; i < knob("launches", 100); i++) {
		CALL(cudaGraphLaunch, 0, exec, stream);
		CALL(cudaStreamSynchronize, 0, stream);
	}
	CALL(cudaGraphExecDestroy, 0, exec);
	CALL(cudaGraphDestroy, 0, captured);
}

/* Launches as fast as one core goes. */
void storm(void)
{
	for (u64 i = 0; i < knob("launches", 200003); i++)
		CALL(cudaLaunchKernel, 0, KERNEL, GRID, BLOCK, NULL, 0, NULL);
}

/* Bare calls without an account, for the cost of a probe: prints ns per call. */
void cost(void)
{
	u64 launches = knob("launches", 200000), started_ns = now_ns();

	for (u64 i = 0; i < launches; i++)
		cudaLaunchKernel(KERNEL, GRID, BLOCK, NULL, 0, NULL);
	fact("launch_ns", "%llu", (now_ns() - started_ns) / launches);
	started_ns = now_ns();
	sim_event_t event;
	cudaEventCreate(&event);
	for (u64 i = 0; i < launches; i++)
		cudaEventRecord(event, NULL);
	fact("record_ns", "%llu", (now_ns() - started_ns) / launches);
}

/* A call that does not come back for a while. */
void hang(void)
{
	u64 wait_ns = knob("wait_ms", 60000) * 1000000;

	sim_stream_push(NULL, wait_ns);
	printf("hanging\n");
	fflush(stdout);
	CALL(cudaDeviceSynchronize, 0);
}

/* A prime number of every call, each number its own. */
void primes(void)
{
	struct sim_launch_config config = {.grid = {5, 6, 7}, .block = {8, 9, 10}};
	struct sim_driver_launch_config driver_config = {11, 12, 13, 14, 3, 2, 0, NULL, NULL, 0};
	struct copy_3d copied = {.width = 16, .height = 5, .depth = 3, .kind = D2D};
	sim_stream_t stream;
	sim_event_t event;
	void *block[512], *device, *context;
	size_t pitch, image_bytes;
	const void *image;
	u64 handle;

	CALL(cudaSetDevice, 0, 3);
	cudaStreamCreate(&stream);
	cudaEventCreate(&event);
	config.stream = driver_config.stream = stream;
	fact("stream", "%llu", (u64)stream);
	fact("event", "%llu", (u64)event);
#define TIMES(n) for (u64 i = 0; i < (n); i++)
	TIMES(211) CALL(cudaMalloc, 1000 + i, &block[i], 1000 + i);
	TIMES(211) CALL(cudaFree, 1000 + i, block[i]);
	TIMES(3) CALL(cudaMalloc, 1ull << 40, &device, 1ull << 40);
	TIMES(2) CALL(cudaFree, 0, (void *)0xdead);
	TIMES(5) CALL(cudaMallocPitch, 77 * 13, &block[i], &pitch, 77, 13);
	TIMES(7) CALL(cudaMallocManaged, 4096, &block[i], 4096, 1);
	TIMES(11) CALL(cudaMallocAsync, 8192, &block[i], 8192, stream);
	TIMES(11) CALL(cudaFreeAsync, 8192, block[i], stream);
	TIMES(13) CALL(cudaMallocHost, 333, &block[i], 333);
	TIMES(13) CALL(cudaFreeHost, 333, block[i]);
	TIMES(17) CALL(cudaHostAlloc, 777, &block[i], 777, 0);
	CALL(cudaMalloc, 1 << 20, &device, 1 << 20);
	TIMES(101) CALL(cudaLaunchKernel, 0, KERNEL, GRID, BLOCK, NULL, 64, stream);
	TIMES(19) CALL(cudaLaunchKernel_ptsz, 0, KERNEL, GRID, BLOCK, NULL, 64, stream);
	TIMES(23) CALL(__cudaLaunchKernel, 0, KERNEL, GRID, BLOCK, NULL, 0, stream);
	TIMES(29) CALL(cudaLaunchCooperativeKernel, 0, KERNEL, GRID, BLOCK, NULL, 0, stream);
	TIMES(31) CALL(cudaLaunchKernelExC, 0, &config, KERNEL, NULL);
	TIMES(37) CALL(cudaMemcpy, 4099, device, buffer, 4099, H2D);
	TIMES(41) CALL(cudaMemcpyAsync, 5003, buffer, device, 5003, D2H, stream);
	TIMES(43) CALL(cudaMemcpy2D, 63 * 11, device, 64, buffer, 64, 63, 11, D2D);
	TIMES(47) CALL(cudaMemcpy2DAsync, 31 * 17, device, 64, buffer, 64, 31, 17, H2D, stream);
	TIMES(53) CALL(cudaMemcpy3D, 16 * 5 * 3, &copied);
	TIMES(59) CALL(cudaMemcpyPeer, 6007, device, 1, buffer, 2, 6007);
	TIMES(61) CALL(cudaMemcpyPeerAsync, 7001, device, 1, buffer, 2, 7001, stream);
	TIMES(3) CALL(cudaMemcpy, 1, NULL, NULL, 1, H2D);
	TIMES(67) CALL(cudaMemset, 99, device, 0, 99);
	TIMES(71) CALL(cudaMemsetAsync, 98, device, 0, 98, stream);
	TIMES(73) CALL(cudaEventRecord, 0, event, stream);
	TIMES(79) CALL(cudaStreamWaitEvent, 0, stream, event, 0);
	CALL(cudaLaunchKernel, 0, KERNEL, GRID, BLOCK, NULL, 64, stream);
	TIMES(83) CALL(cudaStreamQuery, 0, stream);
	TIMES(89) CALL(cudaEventQuery, 0, event);
	TIMES(2) CALL(cudaEventSynchronize, 0, event);
	TIMES(97) CALL(cudaStreamSynchronize, 0, stream);
	TIMES(5) CALL(cudaDeviceSynchronize, 0);
	TIMES(103) CALL(cuLaunchKernel, 0, KERNEL, 3, 5, 7, 11, 13, 2, 0, stream, NULL, NULL);
	TIMES(107) CALL(cuLaunchKernelEx, 0, &driver_config, KERNEL, NULL, NULL);
	TIMES(109) {
		CALL(cuMemAlloc_v2, 2048, &handle, 2048);
		CALL(cuMemFree_v2, 2048, handle);
	}
	TIMES(113) {
		CALL(cuMemCreate, 1 << 21, &handle, 1 << 21, NULL, 0);
		CALL(cuMemRelease, 1 << 21, handle);
	}
	TIMES(127) CALL(cuMemcpyHtoD_v2, 1234, (u64)device, buffer, 1234);
	TIMES(131) CALL(cuMemcpyHtoDAsync_v2, 4321, (u64)device, buffer, 4321, stream);
	TIMES(3) CALL(cuStreamSynchronize, 0, stream);
	TIMES(7) CALL(cuCtxSynchronize, 0);
	TIMES(11) {
		CALL(cuLinkAddData_v2, 0, (void *)0x11, 1, buffer, 99, "code", 0, NULL, NULL);
		CALL(cuLinkComplete, 0, (void *)0x11, &image, &image_bytes);
	}
	CALL(cuDevicePrimaryCtxRetain, 0, &context, 5);
	CALL(cuCtxSetCurrent, 0, context);
	TIMES(13) CALL(cuCtxSynchronize, 0);
	CALL(cuCtxSetCurrent, 0, (void *)0xdead);
	TIMES(17) CALL(cuCtxSynchronize, 0);
	/* Nobody has seen this one opened. */
	CALL(cuCtxSetCurrent, 0, (char *)context + 1);
	TIMES(19) CALL(cuCtxSynchronize, 0);
#undef TIMES
}

/* ── Several ranks ───────────────────────────────────────────────────────── */

u64 mix(u64 value)
{
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
	value = (value ^ value >> 27) * 0x94d049bb133111ebull;
	return value ^ value >> 31;
}

u64 hash_of(const struct unique_id *id)
{
	u64 words[16], hash = 0x9e3779b97f4a7c15ull;

	memcpy(words, id, sizeof(words));
	for (int i = 0; i < 16; i++)
		hash = mix(hash ^ words[i]);
	return hash;
}

/* Rank 0 inherited a listening socket; the others come to its port, as torchrun's store works. */
void share_id(struct unique_id *id, int rank, int nranks)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd;

	if (getenv("MASTER_ADDR"))
		inet_pton(AF_INET, getenv("MASTER_ADDR"), &address.sin_addr);
	address.sin_port = htons(from_environment("MASTER_PORT", 0));
	if (rank == 0) {
		ncclGetUniqueId(id);
		for (int i = 1; i < nranks; i++) {
			fd = accept(from_environment("GPUSIM_LISTEN_FD", 0), NULL, NULL);
			if (fd < 0 || write(fd, id, sizeof(*id)) != sizeof(*id))
				exit(3);
			close(fd);
		}
		return;
	}
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
	    recv(fd, id, sizeof(*id), MSG_WAITALL) != sizeof(*id))
		exit(3);
	close(fd);
}

void make_comm(comm_t *comm, int nranks, struct unique_id *id, int rank)
{
	u64 how = knob("init", 0);

	if (how == 2)
		CALL(ncclCommInitRankScalable, 0, comm, nranks, rank, 1, id, NULL);
	else if (how == 1)
		CALL(ncclCommInitRankConfig, 0, comm, nranks, *id, rank, NULL);
	else
		CALL(ncclCommInitRank, 0, comm, nranks, *id, rank);
	if (!*comm)
		exit(4);
}

void ranks(void)
{
	int rank = from_environment("RANK", 0), nranks = from_environment("WORLD_SIZE", 1), sub_rank, sub_nranks;
	u64 steps = knob("steps", 30), count = knob("count", 1 << 20), kernels = knob("kernels", 20);
	u64 slow_rank = knob("slow_rank", -1ull), slow_from = knob("slow_from", 0), slow_ns = knob("slow_us", 0) * 1000;
	comm_t comm = NULL, half = NULL;
	struct unique_id id;
	sim_stream_t stream, own;
	sim_event_t ready, done;

	CALL(cudaSetDevice, 0, from_environment("LOCAL_RANK", 0));
	cudaStreamCreate(&stream);
	cudaStreamCreate(&own);
	cudaEventCreate(&ready);
	cudaEventCreate(&done);
	share_id(&id, rank, nranks);
	make_comm(&comm, nranks, &id, rank);
	fact("rank", "%llu", rank);
	fact("nranks", "%llu", nranks);
	fact("comm_hash", "%llu", hash_of(&id));
	fact("stream", "%llu", (u64)stream);
	if (knob("split", 0)) {
		CALL(ncclCommSplit, 0, comm, rank % 2, -rank, &half, NULL);
		CALL(ncclCommUserRank, 0, half, &sub_rank);
		CALL(ncclCommCount, 0, half, &sub_nranks);
		fact("split_rank", "%llu", sub_rank);
		fact("split_nranks", "%llu", sub_nranks);
		fact("split_hash", "%llu", mix(mix(hash_of(&id) ^ 1) ^ (rank % 2)));
	}
	for (u64 i = 0; i < steps; i++) {
		if ((u64)rank == slow_rank && i >= slow_from)
			rest(slow_ns);
		step(stream, kernels);
		if (knob("own_stream", 0)) { /* as PyTorch's process groups do it */
			CALL(cudaEventRecord, 0, ready, stream);
			CALL(cudaStreamWaitEvent, 0, own, ready, 0);
			CALL(ncclAllReduce, count * 4, NULL, NULL, count, FLOAT, 0, comm, own);
			CALL(cudaEventRecord, 0, done, own);
			CALL(cudaStreamWaitEvent, 0, stream, done, 0);
		} else {
			CALL(ncclAllReduce, count * 4, NULL, NULL, count, FLOAT, 0, comm, stream);
		}
		if (half) {
			CALL(ncclGroupStart, 0);
			CALL(ncclAllGather, 1031 * 2, NULL, NULL, 1031, BFLOAT16, half, stream);
			CALL(ncclGroupEnd, 0);
		}
		CALL(cudaStreamSynchronize, 0, stream);
	}
	CALL(ncclBroadcast, 17 * 8, NULL, NULL, 17, 8, 0, comm, stream);
	CALL(ncclReduceScatter, 19, NULL, NULL, 19, 1, 2, comm, stream);
	CALL(cudaStreamSynchronize, 0, stream);
	if (half)
		CALL(ncclCommDestroy, 0, half);
	CALL(ncclCommDestroy, 0, comm);
}

/* A server that answers one request after another: a prompt, then a token at a time. Every step brings its token back and
 * waits for it. Several ranks share each step's work, as tensor parallelism does: they meet in it. The account says how many
 * steps of each kind there were and how long they took, from the first call to the return of the wait. */
void serve_step(sim_stream_t stream, void *cache, u64 input, u64 kernels, comm_t comm, u64 slow_ns)
{
	u64 count = input / 8 * 4096; /* one number of 4 bytes for each of 4096 hidden features of each token */
	struct sim_dim3 grid = {input > 8 ? 512 : 8, 1, 1};

	CALL(cudaMemcpyAsync, input, cache, buffer, input, H2D, stream);
	if (slow_ns)
		rest(slow_ns);
	for (u64 i = 0; i < kernels; i++)
		CALL(cudaLaunchKernel, 0, KERNEL, grid, BLOCK, NULL, 0, stream);
	if (comm)
		CALL(ncclAllReduce, count * 4, NULL, NULL, count, FLOAT, 0, comm, stream);
}

void serve(void)
{
	int rank = from_environment("RANK", 0), nranks = from_environment("WORLD_SIZE", 1);
	u64 requests = knob("requests", 40), tokens = knob("tokens", 20), idle_ns = knob("idle_us", 5000) * 1000;
	u64 prompt = knob("prompt_bytes", 16384), kernels = knob("kernels", 12), prompt_kernels = knob("prompt_kernels", 120);
	u64 slow_from = knob("slow_from", -1ull), slow_each = knob("slow_each", 10), slow_ns = knob("slow_us", 30000) * 1000;
	u64 slow_rank = knob("slow_rank", 0), decode_ns = 0, prefill_ns = 0, n_slow = 0, done = 0, began_ns, is_slow;
	sim_stream_t stream;
	comm_t comm = NULL;
	struct unique_id id;
	void *cache;

	CALL(cudaSetDevice, 0, from_environment("LOCAL_RANK", 0));
	cudaStreamCreate(&stream);
	fact("stream", "%llu", (u64)stream);
	fact("rank", "%llu", rank);
	if (nranks > 1) {
		share_id(&id, rank, nranks);
		make_comm(&comm, nranks, &id, rank);
	}
	for (u64 i = 0; i < requests; i++) {
		rest(idle_ns);
		CALL(cudaMallocAsync, 4 << 20, &cache, 4 << 20, stream);
		for (u64 token = 0; token <= tokens; token++) {
			began_ns = now_ns();
			is_slow = token && (u64)rank == slow_rank && done >= slow_from && !(done % slow_each);
			n_slow += is_slow;
			serve_step(stream, cache, token ? 8 : prompt, token ? kernels : prompt_kernels, comm,
				   is_slow ? slow_ns : 0);
			CALL(cudaMemcpyAsync, 4, buffer, cache, 4, D2H, stream);
			CALL(cudaStreamSynchronize, 0, stream);
			*(token ? &decode_ns : &prefill_ns) += now_ns() - began_ns;
			done += !!token;
		}
		CALL(cudaFreeAsync, 4 << 20, cache, stream);
	}
	fact("n_prefill", "%llu", requests);
	fact("n_decode", "%llu", done);
	fact("n_slow", "%llu", n_slow);
	fact("prefill_ns", "%llu", prefill_ns);
	fact("decode_ns", "%llu", decode_ns);
	if (comm)
		CALL(ncclCommDestroy, 0, comm);
}

static const struct {
	const char *name;
	void (*run)(void);
} WORKLOADS[] = {
	{"train", train}, {"infer", infer}, {"leak", leak},   {"fragment", fragment}, {"copy", copy}, {"sync", synchronise},
	{"graph", graph}, {"ranks", ranks}, {"storm", storm}, {"primes", primes},     {"hang", hang}, {"cost", cost},
	{"serve", serve},
};

int main(int argc, char **argv)
{
	u64 started_ns = now_ns();

	n_arguments = argc;
	arguments = argv;
	if (getenv("GPUSIM_LISTEN_FD")) /* a runner made us, whose end, even by SIGKILL, is ours */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	rest(knob("wait_us", 0) * 1000);
	if (knob("gate", 0)) /* wait for a line: whoever watches is ready */
		while (getchar() != '\n' && !feof(stdin))
			;
	for (size_t i = 0; argc > 1 && i < sizeof(WORKLOADS) / sizeof(*WORKLOADS); i++) {
		if (strcmp(argv[1], WORKLOADS[i].name))
			continue;
		WORKLOADS[i].run();
		print_account(argv[1], started_ns);
		return 0;
	}
	fprintf(stderr, "usage: %s WORKLOAD [knob=value ...]\n", argv[0]);
	return 2;
}
