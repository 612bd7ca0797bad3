/* The file behind the ring: INGERO_NCCL_DIR or /dev/shm, then ingero-nccl-UID/PID-NANOSECONDS.ring.
 *
 * The folder is its owner's alone. Pages are allocated before they are mapped, because a full tmpfs would otherwise end the
 * training with SIGBUS. The writer holds a lock on its file for as long as it lives, so that anybody can tell a dead
 * process's file; the next process of the same user removes those, and those of which a process died before it named them.
 */
#define _GNU_SOURCE
#include "ring.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { NAME_BYTES = 64, MOST_FILES = 4096, NAMED_WITHIN_S = 60 };

static struct ring *mapped;
static int file_fd = -1;
static char file_path[512];

u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
}

/* The folder, ours alone; -1 when there is none that may be trusted. */
static int open_folder(char *path, size_t size, const char **why)
{
	const char *parent = getenv("INGERO_NCCL_DIR");
	struct stat status;
	int fd;

	snprintf(path, size, "%s/ingero-nccl-%u", parent && *parent ? parent : "/dev/shm", (unsigned)geteuid());
	if (mkdir(path, 0700) && errno != EEXIST) {
		*why = "its folder cannot be made";
		return -1;
	}
	fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &status) || status.st_uid != geteuid() || status.st_mode & 077) {
		*why = "its folder is not ours alone";
		if (fd >= 0)
			close(fd);
		return -1;
	}
	return fd;
}

/* Whether a file is so old that its writer, had it lived, would have locked and named it. */
static int is_old(int file)
{
	struct stat status;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return !fstat(file, &status) && now.tv_sec - status.st_mtim.tv_sec > NAMED_WITHIN_S;
}

/* Files of processes that are gone: nobody holds their lock. One without a name yet is not locked from the first moment. */
static void remove_dead(int folder)
{
	int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *entries = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	if (!entries && fd >= 0)
		close(fd);
	for (int i = 0; entries && i < MOST_FILES && (entry = readdir(entries)); i++) {
		int file;

		bool is_named = strstr(entry->d_name, ".ring");

		if (!is_named && !strstr(entry->d_name, ".wing"))
			continue;
		file = openat(folder, entry->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		if (file < 0)
			continue;
		if ((is_named || is_old(file)) && !flock(file, LOCK_EX | LOCK_NB))
			unlinkat(folder, entry->d_name, 0);
		close(file);
	}
	if (entries)
		closedir(entries);
}

static struct ring *map_file(int fd)
{
	struct ring *ring;

	if (flock(fd, LOCK_EX | LOCK_NB) || posix_fallocate(fd, 0, sizeof(*ring)))
		return NULL;
	ring = mmap(NULL, sizeof(*ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return ring == MAP_FAILED ? NULL : ring;
}

struct ring *ring_open(u32 api, const char **why)
{
	char folder_path[256], name[NAME_BYTES], made[NAME_BYTES + 8];
	u64 began_ns = now_ns();
	int folder = open_folder(folder_path, sizeof(folder_path), why), fd;
	struct ring *ring = NULL;

	if (folder < 0)
		return NULL;
	remove_dead(folder);
	snprintf(name, sizeof(name), "%d-%llu.ring", (int)getpid(), (unsigned long long)began_ns);
	snprintf(made, sizeof(made), ".%s", name);
	made[strlen(made) - 4] = 'w'; /* ".wing": nobody takes it for a ring before it is one */
	*why = "its file cannot be made or filled";
	fd = openat(folder, made, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd >= 0)
		ring = map_file(fd);
	if (ring) {
		ring->magic = RING_MAGIC;
		ring->version = RING_VERSION;
		ring->n_records = N_RECORDS;
		ring->record_bytes = sizeof(struct record);
		ring->n_comms = N_COMMS;
		ring->pid = (u32)getpid();
		ring->api = api;
		ring->began_ns = began_ns;
	}
	if (fd >= 0 && (!ring || renameat(folder, made, folder, name))) {
		unlinkat(folder, made, 0);
		if (ring)
			munmap(ring, sizeof(*ring));
		close(fd);
		ring = NULL;
	}
	close(folder);
	if (ring) {
		snprintf(file_path, sizeof(file_path), "%s/%s", folder_path, name);
		mapped = ring;
		file_fd = fd;
	}
	return ring;
}

void ring_close(void)
{
	if (!mapped)
		return;
	if (mapped->pid == (u32)getpid()) /* in a fork the file is the parent's */
		unlink(file_path);
	munmap(mapped, sizeof(*mapped));
	close(file_fd);
	mapped = NULL;
	file_fd = -1;
}

struct record *ring_claim(struct ring *ring, u64 *stamp)
{
	u64 position = atomic_fetch_add(&ring->head, 1), seen;
	struct record *record = &ring->records[position % N_RECORDS];

	*stamp = position + 1;
	seen = atomic_load(&record->stamp);
	/* Whoever was held up for a whole round must not write over a later record, nor have to wait. */
	if (seen & WRITING || seen > *stamp ||
	    !atomic_compare_exchange_strong(&record->stamp, &seen, *stamp | WRITING))
		return NULL;
	atomic_thread_fence(memory_order_release);
	return record;
}

void ring_publish(struct record *record, u64 stamp)
{
	atomic_store_explicit(&record->stamp, stamp, memory_order_release);
}
