/* libnccl: communicators between processes over sockets.
 *
 * ncclGetUniqueId starts a coordinator thread; its address is the id. Every rank keeps one connection. A collective
 * tells the coordinator when this rank's stream will reach it; the answer, sent when all have told, is the time at which
 * the last one does, plus the transfer. So a late rank holds up all others, as in life, and no time is simulated twice.
 */
#include "sim.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_RANKS = 256, ID_BYTES = 128, MAX_WAITING = 256, N_TYPES = 12 };
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
enum message_type { HELLO = 1, MEET, SPLIT };

struct unique_id {
	char bytes[ID_BYTES];
};

struct address {
	u64 magic;
	struct sockaddr_in socket;
};

struct message {
	u64 type, group, number, n_members, duration_ns, ready_ns;
	int64_t rank, color, key;
};

struct reply {
	u64 to_group, to_number; /* which message this answers */
	u64 group, done_ns;
	int64_t rank, nranks;
};

struct sim_comm {
	int fd;
	u64 group, n_calls;
	int rank, nranks, owns_fd;
	int n_waiting;
	struct reply waiting[MAX_WAITING]; /* read, and not yet asked for */
	struct sim_comm *root;
};

/* ── Coordinator ─────────────────────────────────────────────────────────── */

struct meeting {
	u64 group, number, n_members, n_arrived, done_ns;
	int fds[MAX_RANKS];
	struct message said[MAX_RANKS];
	struct meeting *next;
};

struct coordinator {
	int listener;
	int fds[MAX_RANKS];
	int n_fds;
	struct meeting *meetings;
	u64 next_group;
};

static int read_all(int fd, void *to, size_t bytes)
{
	return recv(fd, to, bytes, MSG_WAITALL) == (ssize_t)bytes ? 0 : -1;
}

static int write_all(int fd, const void *from, size_t bytes)
{
	return send(fd, from, bytes, MSG_NOSIGNAL) == (ssize_t)bytes ? 0 : -1;
}

static int is_before(const struct message *a, const struct message *b)
{
	return a->key != b->key ? a->key < b->key : a->rank < b->rank;
}

static void answer_split(struct coordinator *self, struct meeting *met)
{
	u64 first_group = self->next_group;

	self->next_group += met->n_members;
	for (u64 i = 0; i < met->n_members; i++) {
		struct reply reply = {.to_group = met->group, .to_number = met->number};
		u64 leader = i;

		for (u64 j = 0; j < met->n_members; j++) {
			if (met->said[j].color != met->said[i].color)
				continue;
			reply.nranks++;
			reply.rank += is_before(&met->said[j], &met->said[i]);
			if (j < leader)
				leader = j;
		}
		reply.group = met->said[i].color < 0 ? 0 : first_group + leader;
		write_all(met->fds[i], &reply, sizeof(reply));
	}
}

static void answer(struct coordinator *self, struct meeting *met)
{
	struct reply reply = {.to_group = met->group, .to_number = met->number, .done_ns = met->done_ns};

	if (met->said[0].type == SPLIT) {
		answer_split(self, met);
		return;
	}
	for (u64 i = 0; i < met->n_members; i++)
		write_all(met->fds[i], &reply, sizeof(reply));
}

static void arrive(struct coordinator *self, int fd, const struct message *said)
{
	struct meeting **link = &self->meetings, *met;
	u64 done_ns = said->ready_ns + said->duration_ns;

	while (*link && ((*link)->group != said->group || (*link)->number != said->number))
		link = &(*link)->next;
	if (!*link) {
		*link = calloc(1, sizeof(**link));
		(*link)->group = said->group;
		(*link)->number = said->number;
		(*link)->n_members = said->n_members;
	}
	met = *link;
	met->fds[met->n_arrived] = fd;
	met->said[met->n_arrived++] = *said;
	if (done_ns > met->done_ns)
		met->done_ns = done_ns;
	if (met->n_arrived == met->n_members) {
		answer(self, met);
		*link = met->next;
		free(met);
	}
}

static void *coordinate(void *argument)
{
	struct coordinator *self = argument;

	for (;;) {
		struct pollfd polled[MAX_RANKS + 1] = {{.fd = self->listener, .events = POLLIN}};
		int n_fds = self->n_fds;

		for (int i = 0; i < n_fds; i++)
			polled[i + 1] = (struct pollfd){.fd = self->fds[i], .events = POLLIN};
		if (poll(polled, n_fds + 1, -1) < 0)
			continue;
		for (int i = 0; i < n_fds; i++) {
			struct message said;

			if (!polled[i + 1].revents)
				continue;
			if (read_all(self->fds[i], &said, sizeof(said))) {
				close(self->fds[i]);
				self->fds[i] = -1; /* poll() ignores it */
			} else {
				arrive(self, self->fds[i], &said);
			}
		}
		if (polled[0].revents && self->n_fds < MAX_RANKS)
			self->fds[self->n_fds++] = accept(self->listener, NULL, NULL);
	}
	return NULL;
}

API int ncclGetUniqueId(struct unique_id *id)
{
	struct coordinator *self = calloc(1, sizeof(*self));
	struct address *address = (struct address *)id->bytes;
	socklen_t length = sizeof(address->socket);
	pthread_t thread;

	/* Filled to the end, as a real id is not zero behind its address. */
	for (int i = 0; i < ID_BYTES; i++)
		id->bytes[i] = (char)(sim_now_ns() >> (i % 4) ^ (u64)getpid() * (i + 1));
	self->next_group = 2;
	self->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	memset(&address->socket, 0, sizeof(address->socket));
	address->socket.sin_family = AF_INET;
	address->socket.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (getenv("GPUSIM_HOST"))
		inet_pton(AF_INET, getenv("GPUSIM_HOST"), &address->socket.sin_addr);
	if (bind(self->listener, (struct sockaddr *)&address->socket, length) || listen(self->listener, MAX_RANKS) ||
	    getsockname(self->listener, (struct sockaddr *)&address->socket, &length))
		return SYSTEM_ERROR;
	return pthread_create(&thread, NULL, coordinate, self) ? SYSTEM_ERROR : SUCCESS;
}

/* ── A rank ──────────────────────────────────────────────────────────────── */

/* Wait for the answer to one message; answers to others of this connection may come first. */
static struct reply wait_reply(const struct sim_comm *comm, u64 number)
{
	struct sim_comm *root = comm->root;
	struct reply reply;

	for (int i = 0; i < root->n_waiting; i++) {
		if (root->waiting[i].to_group == comm->group && root->waiting[i].to_number == number) {
			reply = root->waiting[i];
			root->waiting[i] = root->waiting[--root->n_waiting];
			return reply;
		}
	}
	for (;;) {
		if (read_all(root->fd, &reply, sizeof(reply)))
			return (struct reply){.done_ns = sim_now_ns()};
		if (reply.to_group == comm->group && reply.to_number == number)
			return reply;
		if (root->n_waiting < MAX_WAITING)
			root->waiting[root->n_waiting++] = reply;
	}
}

/* Returns the message's number on its communicator. */
static u64 tell(struct sim_comm *comm, struct message said)
{
	said.group = comm->group;
	said.number = comm->n_calls++;
	said.n_members = comm->nranks;
	said.rank = comm->rank;
	write_all(comm->root->fd, &said, sizeof(said));
	return said.number;
}

struct ticket {
	struct sim_comm *comm;
	u64 number;
};

static u64 wait_done(void *what)
{
	struct ticket *ticket = what;
	u64 done_ns = wait_reply(ticket->comm, ticket->number).done_ns;

	free(ticket);
	return done_ns;
}

static int init_rank(struct sim_comm **out, int nranks, const struct unique_id *id, int rank)
{
	const struct address *address = (const struct address *)id->bytes;
	struct sim_comm *comm;
	int yes = 1;

	if (!out || rank < 0 || rank >= nranks || nranks > MAX_RANKS)
		return INVALID_ARGUMENT;
	comm = calloc(1, sizeof(*comm));
	comm->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	comm->root = comm;
	comm->group = 1;
	comm->rank = rank;
	comm->nranks = nranks;
	comm->owns_fd = 1;
	if (connect(comm->fd, (const struct sockaddr *)&address->socket, sizeof(address->socket))) {
		close(comm->fd);
		free(comm);
		return SYSTEM_ERROR;
	}
	setsockopt(comm->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	/* All ranks meet, as the real call does. */
	wait_reply(comm, tell(comm, (struct message){.type = MEET, .ready_ns = sim_now_ns()}));
	*out = comm;
	return SUCCESS;
}

API int ncclCommInitRank(struct sim_comm **out, int nranks, struct unique_id id, int rank)
{
	return init_rank(out, nranks, &id, rank);
}

API int ncclCommInitRankConfig(struct sim_comm **out, int nranks, struct unique_id id, int rank, void *config)
{
	(void)config;
	return init_rank(out, nranks, &id, rank);
}

API int ncclCommInitRankScalable(struct sim_comm **out, int nranks, int rank, int n_ids, struct unique_id *ids, void *config)
{
	(void)config;
	return n_ids > 0 ? init_rank(out, nranks, ids, rank) : INVALID_ARGUMENT;
}

API int ncclCommSplit(struct sim_comm *comm, int color, int key, struct sim_comm **out, void *config)
{
	struct reply reply;
	struct sim_comm *child;

	(void)config;
	if (!comm || !out)
		return INVALID_ARGUMENT;
	reply = wait_reply(comm->root, tell(comm, (struct message){.type = SPLIT, .color = color, .key = key}));
	if (!reply.group) {
		*out = NULL;
		return SUCCESS;
	}
	child = calloc(1, sizeof(*child));
	child->root = comm->root;
	child->group = reply.group;
	child->rank = (int)reply.rank;
	child->nranks = (int)reply.nranks;
	*out = child;
	return SUCCESS;
}

API int ncclCommUserRank(const struct sim_comm *comm, int *rank)
{
	*rank = comm->rank;
	return SUCCESS;
}

API int ncclCommCount(const struct sim_comm *comm, int *count)
{
	*count = comm->nranks;
	return SUCCESS;
}

API int ncclCommDestroy(struct sim_comm *comm)
{
	if (!comm)
		return INVALID_ARGUMENT;
	if (comm->owns_fd)
		close(comm->fd);
	free(comm);
	return SUCCESS;
}

static int collective(struct sim_comm *comm, size_t count, int type, sim_stream_t stream)
{
	static const unsigned char sizes[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
	struct ticket *ticket;
	u64 wire_ns;

	if (!comm || type < 0 || type >= N_TYPES)
		return INVALID_ARGUMENT;
	wire_ns = (u64)count * sizes[type] * 1000 / sim_setting("WIRE_MB_PER_S", 20000);
	ticket = malloc(sizeof(*ticket));
	ticket->comm = comm;
	ticket->number = tell(comm, (struct message){.type = MEET,
						      .duration_ns = wire_ns,
						      .ready_ns = sim_stream_busy_until(stream)});
	sim_stream_defer(stream, wait_done, ticket);
	return SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int redop, struct sim_comm *comm,
		      sim_stream_t stream)
{
	(void)from, (void)to, (void)redop;
	return collective(comm, count, type, stream);
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int redop, struct sim_comm *comm,
			  sim_stream_t stream)
{
	(void)from, (void)to, (void)redop;
	return collective(comm, count, type, stream);
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, struct sim_comm *comm, sim_stream_t stream)
{
	(void)from, (void)to;
	return collective(comm, count, type, stream);
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct sim_comm *comm,
		      sim_stream_t stream)
{
	(void)from, (void)to;
	return root >= 0 ? collective(comm, count, type, stream) : INVALID_ARGUMENT;
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int redop, int root, struct sim_comm *comm,
		   sim_stream_t stream)
{
	(void)from, (void)to, (void)redop;
	return root >= 0 ? collective(comm, count, type, stream) : INVALID_ARGUMENT;
}

API int ncclGroupStart(void)
{
	return SUCCESS;
}

API int ncclGroupEnd(void)
{
	return SUCCESS;
}
