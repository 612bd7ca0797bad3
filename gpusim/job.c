/* A synchronous training job for `ingero up`: every step loads, computes, reads its loss and meets its peers.
 *
 * Usage: job rank | job store | job spin | job read FILE. The step waits for its kernels before the collective, as a loop that reads its loss does;
 * so the host sees how long a rank's own work took. Faults come through a shared page that the launcher may write at any
 * time. Nothing that a rank knows of its faults reaches a tracer except through the calls it makes.
 *
 * GPUSIM_REPORT=FILE: where no probe can be had, a rank appends what it called (struct report). GPUSIM_DATA=FILE: read past
 * the page cache when load_bytes asks for it. GPUSIM_PAIRS=1: ranks 2k and 2k + 1 first meet on a link of their own.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include "sim.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 256, FLOAT = 7, N_LAUNCHES = 20, BLOCK = 4096 };
enum { COUNT = 1 << 20 };

struct unique_id {
	char bytes[128];
};

/* Written by the launcher; ingero.sim.job has the same layout. */
struct control {
	u64 seed;
	u64 step_ns;       /* a rank's own work per step */
	u64 cpu_ns;        /* spent on the processor meanwhile */
	u64 jitter_ppm;    /* greatest random deviation of a step's work */
	u64 imbalance_ppm; /* extra work of one rank, another in each step */
	u64 load_ns;       /* processor time that a rank's data takes before each step */
	u64 load_bytes;    /* data read from the disk before each step, a multiple of BLOCK */
	u64 extra_ppm[MAX_RANKS];
};

enum what { COLLECTIVE = 1, WAIT = 2 };

/* One call, appended when it returned; docs/specs/simulator-calls.md. Times are CLOCK_MONOTONIC. */
struct report {
	uint32_t what;
	int32_t rank, n_ranks;
	uint32_t n_launches; /* since the record before */
	u64 mono_ns;         /* entry */
	u64 duration_ns;
	u64 comm; /* equal on all ranks of a communicator; a wait has none of what follows */
	u64 seq;  /* from 1 */
	u64 bytes;
	u64 reserved;
};
_Static_assert(sizeof(struct report) == 64, "spec");

typedef struct sim_comm *comm_t;

struct link {
	comm_t comm;
	u64 id, seq;
	int rank, n_ranks;
};

int cudaLaunchKernel(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int cudaSetDevice(int);
int cudaStreamCreate(sim_stream_t *);
int cudaStreamSynchronize(sim_stream_t);
int ncclGetUniqueId(struct unique_id *);
int ncclCommInitRank(comm_t *, int, struct unique_id, int);
int ncclCommSplit(comm_t, int, int, comm_t *, void *);
int ncclCommUserRank(comm_t, int *);
int ncclCommCount(comm_t, int *);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, sim_stream_t);

u64 mix(u64 value)
{
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
	value = (value ^ value >> 27) * 0x94d049bb133111ebull;
	return value ^ value >> 31;
}

int number(const char *name)
{
	const char *text = getenv(name);

	return text ? atoi(text) : 0;
}

/* Give every rank the id, then keep the meeting place open. */
int store(void)
{
	struct unique_id id;

	if (ncclGetUniqueId(&id))
		return 3;
	for (int i = 0; i < number("WORLD_SIZE"); i++) {
		int fd = accept(number("GPUSIM_LISTEN_FD"), NULL, NULL);

		if (fd < 0 || write(fd, &id, sizeof(id)) != sizeof(id))
			return 3;
		close(fd);
	}
	for (;;)
		pause();
}

int fetch_id(struct unique_id *id)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(number("MASTER_PORT"))};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), failed;

	inet_pton(AF_INET, getenv("MASTER_ADDR"), &address.sin_addr);
	failed = connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
		 recv(fd, id, sizeof(*id), MSG_WAITALL) != sizeof(*id);
	close(fd);
	return failed;
}

/* Host work: needs the processor, so it takes longer where others have it. */
void compute_on_cpu(u64 duration_ns)
{
	struct timespec now;
	u64 ends_ns = 0, spent_ns;

	do {
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
		spent_ns = (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
		if (!ends_ns)
			ends_ns = spent_ns + duration_ns;
	} while (spent_ns < ends_ns);
}

u64 extra_ppm(const volatile struct control *control, u64 step, int rank, int nranks)
{
	u64 ppm = control->extra_ppm[rank];

	if (control->imbalance_ppm && (int)(mix(control->seed ^ step << 8) % (u64)nranks) == rank)
		ppm += control->imbalance_ppm;
	if (control->jitter_ppm)
		ppm += mix(control->seed ^ step << 20 ^ (u64)(rank + 1)) % control->jitter_ppm;
	return ppm;
}

/* ── What a rank says of itself ──────────────────────────────────────────── */

static int report_fd = -1;
static uint32_t n_launches;

void report(enum what what, const struct link *link, u64 entry_ns)
{
	struct report said = {.what = what, .n_launches = n_launches, .mono_ns = entry_ns};

	if (report_fd < 0)
		return;
	n_launches = 0;
	said.duration_ns = sim_now_ns() - entry_ns;
	if (what == COLLECTIVE) {
		said.rank = link->rank;
		said.n_ranks = link->n_ranks;
		said.comm = link->id;
		said.seq = link->seq;
		said.bytes = COUNT * 4ull;
	}
	/* A full disk loses the record, never the step. */
	if (write(report_fd, &said, sizeof(said)) < 0)
		return;
}

/* ── A step ──────────────────────────────────────────────────────────────── */

u64 hash_of(const struct unique_id *id)
{
	u64 words[sizeof(*id) / sizeof(u64)], hash = 0x9e3779b97f4a7c15ull;

	memcpy(words, id, sizeof(words));
	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
		hash = mix(hash ^ words[i]);
	return hash;
}

/* Fetch the step's data: from the disk itself, then some work on it. */
void load(const volatile struct control *control, u64 step, int fd, void *block, u64 data_bytes)
{
	u64 bytes = control->load_bytes;

	for (u64 done = 0; fd >= 0 && data_bytes && done < bytes; done += BLOCK)
		if (pread(fd, block, BLOCK, (off_t)((mix(step) + done) % (data_bytes / BLOCK) * BLOCK)) < 0)
			break;
	if (control->load_ns)
		compute_on_cpu(control->load_ns);
}

void compute(const volatile struct control *control, u64 step, int rank, int nranks, sim_stream_t stream)
{
	static const struct sim_dim3 grid = {64, 1, 1}, block = {256, 1, 1};
	u64 began_ns = sim_now_ns(), wanted_ns = control->step_ns;

	wanted_ns += wanted_ns / 1000 * extra_ppm(control, step, rank, nranks) / 1000;
	compute_on_cpu(control->cpu_ns);
	for (int i = 0; i < N_LAUNCHES; i++)
		cudaLaunchKernel((void *)0x401000, grid, block, NULL, 0, stream);
	n_launches += N_LAUNCHES;
	/* The rest of the step's work does not need the processor, as on a device that is kept busy. */
	sim_sleep_until(began_ns + wanted_ns);
	cudaStreamSynchronize(stream);
}

void meet(struct link *link, sim_stream_t stream)
{
	u64 entry_ns = sim_now_ns();

	link->seq++;
	ncclAllReduce(NULL, NULL, COUNT, FLOAT, 0, link->comm, stream);
	report(COLLECTIVE, link, entry_ns);
	entry_ns = sim_now_ns();
	cudaStreamSynchronize(stream);
	report(WAIT, link, entry_ns);
}

int open_data(u64 *bytes)
{
	const char *path = getenv("GPUSIM_DATA");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
	off_t end = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);

	*bytes = end > 0 ? (u64)end : 0;
	return fd;
}

/* A link of this rank's own with its neighbour. */
int pair_up(struct link *pair, const struct link *world)
{
	if (ncclCommSplit(world->comm, world->rank / 2, world->rank, &pair->comm, NULL))
		return 4;
	pair->id = mix(world->id + (u64)world->rank / 2 + 1);
	/* A split's own arguments tell neither rank nor size: a tracer learns them from these. */
	return ncclCommUserRank(pair->comm, &pair->rank) || ncclCommCount(pair->comm, &pair->n_ranks) ? 4 : 0;
}

int train(void)
{
	int rank = number("RANK"), nranks = number("WORLD_SIZE"), fd = open(getenv("GPUSIM_CONTROL"), O_RDONLY | O_CLOEXEC);
	const volatile struct control *control = mmap(NULL, sizeof(*control), PROT_READ, MAP_SHARED, fd, 0);
	struct link world = {.rank = rank, .n_ranks = nranks}, pair = {0};
	struct unique_id id;
	sim_stream_t stream;
	u64 data_bytes;
	int data_fd = open_data(&data_bytes);
	void *block;

	if (fd < 0 || control == MAP_FAILED || rank < 0 || rank >= MAX_RANKS || fetch_id(&id))
		return 3;
	if (getenv("GPUSIM_REPORT"))
		report_fd = open(getenv("GPUSIM_REPORT"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (posix_memalign(&block, BLOCK, BLOCK))
		return 3;
	cudaSetDevice(number("LOCAL_RANK"));
	cudaStreamCreate(&stream);
	if (ncclCommInitRank(&world.comm, nranks, id, rank))
		return 4;
	world.id = hash_of(&id);
	if (number("GPUSIM_PAIRS") && pair_up(&pair, &world))
		return 4;
	for (u64 step = 0;; step++) {
		load(control, step, data_fd, block, data_bytes);
		compute(control, step, rank, nranks, stream);
		if (pair.comm)
			meet(&pair, stream);
		meet(&world, stream);
	}
}

/* Neighbours that want the same processor, or the same disk, all the time. */
int spin(void)
{
	for (;;)
		compute_on_cpu(1000000000);
}

int read_on(const char *path)
{
	enum { CHUNK = 256 * BLOCK };
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
	void *chunk;

	if (fd < 0 || posix_memalign(&chunk, BLOCK, CHUNK))
		return 3;
	for (;;)
		if (read(fd, chunk, CHUNK) <= 0 && lseek(fd, 0, SEEK_SET))
			return 3;
}

int main(int argc, char **argv)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (argc > 1 && !strcmp(argv[1], "store"))
		return store();
	if (argc > 1 && !strcmp(argv[1], "spin"))
		return spin();
	if (argc > 2 && !strcmp(argv[1], "read"))
		return read_on(argv[2]);
	return train();
}
