/* A synchronous training job for `ingero up`: every step loads, computes, reads its loss and meets its peers.
 *
 * Usage: job rank | job store. The step waits for its kernels before the collective, as a loop that reads its loss does;
 * so the host sees how long a rank's own work took. Faults come through a shared page that the launcher may write at any
 * time. Nothing that a rank knows of its faults reaches a tracer except through the calls it makes.
 */
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

enum { MAX_RANKS = 256, FLOAT = 7, MILLION = 1000000 };

struct unique_id {
	char bytes[128];
};

/* Written by the launcher; ingero.gpusim.job has the same layout. */
struct control {
	u64 seed;
	u64 step_ns;       /* a rank's own work per step */
	u64 cpu_ns;        /* spent on the processor meanwhile */
	u64 jitter_ppm;    /* greatest random deviation of a step's work */
	u64 imbalance_ppm; /* extra work of one rank, another in each step */
	u64 extra_ppm[MAX_RANKS];
};

typedef struct sim_comm *comm_t;

int cudaLaunchKernel(const void *, struct sim_dim3, struct sim_dim3, void **, size_t, sim_stream_t);
int cudaSetDevice(int);
int cudaStreamCreate(sim_stream_t *);
int cudaStreamSynchronize(sim_stream_t);
int ncclGetUniqueId(struct unique_id *);
int ncclCommInitRank(comm_t *, int, struct unique_id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, sim_stream_t);

static u64 mix(u64 value)
{
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
	value = (value ^ value >> 27) * 0x94d049bb133111ebull;
	return value ^ value >> 31;
}

static int number(const char *name)
{
	const char *text = getenv(name);

	return text ? atoi(text) : 0;
}

/* Give every rank the id, then keep the meeting place open. */
static int store(void)
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

static int fetch_id(struct unique_id *id)
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
static void compute_on_cpu(u64 duration_ns)
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

static u64 extra_ppm(const volatile struct control *control, u64 step, int rank, int nranks)
{
	u64 ppm = control->extra_ppm[rank];

	if (control->imbalance_ppm && (int)(mix(control->seed ^ step << 8) % (u64)nranks) == rank)
		ppm += control->imbalance_ppm;
	if (control->jitter_ppm)
		ppm += mix(control->seed ^ step << 20 ^ (u64)(rank + 1)) % control->jitter_ppm;
	return ppm;
}

static int train(void)
{
	static const struct sim_dim3 grid = {64, 1, 1}, block = {256, 1, 1};
	int rank = number("RANK"), nranks = number("WORLD_SIZE"), fd = open(getenv("GPUSIM_CONTROL"), O_RDONLY | O_CLOEXEC);
	const volatile struct control *control = mmap(NULL, sizeof(*control), PROT_READ, MAP_SHARED, fd, 0);
	struct unique_id id;
	sim_stream_t stream;
	comm_t comm;

	if (fd < 0 || control == MAP_FAILED || rank < 0 || rank >= MAX_RANKS || fetch_id(&id))
		return 3;
	cudaSetDevice(number("LOCAL_RANK"));
	cudaStreamCreate(&stream);
	if (ncclCommInitRank(&comm, nranks, id, rank))
		return 4;
	for (u64 step = 0;; step++) {
		u64 began_ns = sim_now_ns(), wanted_ns = control->step_ns;

		wanted_ns += wanted_ns / 1000 * extra_ppm(control, step, rank, nranks) / 1000;
		compute_on_cpu(control->cpu_ns);
		for (int i = 0; i < 20; i++)
			cudaLaunchKernel((void *)0x401000, grid, block, NULL, 0, stream);
		/* The rest of the step's work does not need the processor, as on a device that is kept busy. */
		sim_sleep_until(began_ns + wanted_ns);
		cudaStreamSynchronize(stream);
		ncclAllReduce(NULL, NULL, 1 << 20, FLOAT, 0, comm, stream);
		cudaStreamSynchronize(stream);
	}
}

int main(int argc, char **argv)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	return argc > 1 && !strcmp(argv[1], "store") ? store() : train();
}
