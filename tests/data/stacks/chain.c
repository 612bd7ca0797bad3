/* Calls a GPU library through functions without frame pointers and tells each call's stack as the C library's own unwinder sees it.
 *
 * For each line on standard input, every path makes one call; the answer is one line of JSON per path: [name, [addresses, innermost first]].
 * backtrace() reads .eh_frame, so it is what our frames are held to.
 */
#define _GNU_SOURCE
#include <alloca.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int cudaStreamSynchronize(void *);
int cudaMalloc(void **, size_t);
int cudaEventCreate(void **);
int cudaEventRecord(void *, void *);
typedef int visit(int);

#if defined(__clang__)
#define NO_INLINE __attribute__((noinline))
#else
#define NO_INLINE __attribute__((noinline, noclone))
#endif
#define KEEP __asm__ volatile("" ::: "memory") /* no tail calls */

static volatile int sink;
static const char *volatile name;
static char answer[1 << 20];

/* Tell the stack outside of the caller: the probed call is another instruction of it than the one that comes here. */
NO_INLINE void tell(void)
{
	static void *told[256];
	int n = backtrace(told, 256);
	size_t at = strlen(answer);

	at += sprintf(answer + at, "[\"%s\", [", name);
	for (int i = 2; i < n; i++)
		at += sprintf(answer + at, "%s%lu", i > 2 ? ", " : "", (unsigned long)(uintptr_t)told[i]);
	sprintf(answer + at, "]]\n");
}

NO_INLINE int leaf(int depth)
{
	int result;

	tell();
	result = cudaStreamSynchronize(0);
	KEEP;
	return result + depth;
}

/* The driver's call inside of the runtime's: on the stack lies the address of the return probe's trampoline. */
NO_INLINE int allocates_memory(int depth)
{
	void *memory;
	int result;

	tell();
	result = cudaMalloc(&memory, 64);
	KEEP;
	return result + depth;
}

/* Probed at its entry alone: the stack begins in the probed function. */
NO_INLINE int records_event(int depth)
{
	static void *event;
	int result = event ? 0 : cudaEventCreate(&event);

	tell();
	result += cudaEventRecord(event, 0);
	KEEP;
	return result + depth;
}

NO_INLINE int saves_registers(int depth)
{
	int a = sink, b = sink * 3, c = sink - 1, d = sink ^ 5, e = sink | 1, f = sink & 7;
	int result = leaf(depth);

	KEEP;
	return result + a * b + c * d + e * f;
}

NO_INLINE int allocates(int depth)
{
	char *room = alloca(16 + 48 * (depth + sink));
	int result;

	memset(room, depth, 16 + 48 * depth);
	result = saves_registers(depth) + room[sink];
	KEEP;
	return result;
}

/* Arguments on the stack and a stack of its own alignment: where the caller's is, is in the frame. */
NO_INLINE int realigns_more(int a, int b, int c, int d, int e, int f, int depth, int g)
{
	_Alignas(64) volatile char room[128];
	char *more = alloca(16 + depth * 8);
	int result;

	memset(more, 1, 16 + depth * 8);
	room[depth & 63] = 1;
	result = allocates(depth) + room[sink] + more[sink] + a + b + c + d + e + f + g;
	KEEP;
	return result;
}

NO_INLINE int realigns(int depth)
{
	int result = realigns_more(1, 2, 3, 4, 5, 6, depth, 7);

	KEEP;
	return result;
}

/* Of the same frame size, called from the same function: only the return addresses tell them apart. */
NO_INLINE int left(int depth)
{
	int result = saves_registers(depth);

	KEEP;
	return result + 1;
}

NO_INLINE int right(int depth)
{
	int result = saves_registers(depth);

	KEEP;
	return result + 2;
}

NO_INLINE int recurses(int depth)
{
	volatile char room[2000];
	int result;

	room[depth] = 1;
	result = depth ? recurses(depth - 1) : saves_registers(depth);
	KEEP;
	return result + room[sink];
}

static volatile int is_wanted;

static int compare(const void *a, const void *b)
{
	if (is_wanted) {
		is_wanted = 0;
		saves_registers(0);
	}
	return *(const int *)a - *(const int *)b;
}

NO_INLINE int sorts(int depth)
{
	int numbers[4] = {4, 3, depth, 1};

	is_wanted = 1;
	qsort(numbers, 4, sizeof(numbers[0]), compare);
	KEEP;
	return numbers[0];
}

static void on_signal(int number)
{
	saves_registers(number);
	KEEP;
}

/* Interrupted right here, and found by the frame pointer: that lies nowhere but in what the kernel pushed for the handler. */
NO_INLINE int is_interrupted(int depth)
{
	char *room = alloca(16 + 48 * (depth + sink));
	long result;

	memset(room, depth, 16 + 48 * depth);
#if defined(__x86_64__)
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(SYS_tgkill), "D"(getpid()), "S"(getpid()), "d"(SIGUSR1)
			 : "rcx", "r11", "memory");
#else
	{
		register long number __asm__("x8") = SYS_tgkill, first __asm__("x0") = getpid();
		register long second __asm__("x1") = first, third __asm__("x2") = SIGUSR1;

		__asm__ volatile("svc #0" : "+r"(first) : "r"(number), "r"(second), "r"(third) : "memory");
		result = first;
	}
#endif
	return (int)result + room[sink];
}

static void *in_thread(void *depth)
{
	allocates((int)(intptr_t)depth);
	KEEP;
	return 0;
}

NO_INLINE int starts_thread(int depth)
{
	pthread_t thread;

	pthread_create(&thread, 0, in_thread, (void *)(intptr_t)depth);
	pthread_join(thread, 0);
	return depth;
}

static void run(const char *path, visit *function, int depth)
{
	name = path;
	sink += function(depth) & 0;
}

int main(void)
{
	char line[64];

	signal(SIGUSR1, on_signal);
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		answer[0] = 0;
		run("plain", saves_registers, 1);
		run("alloca", allocates, 3);
		run("alloca, more", allocates, 9);
		run("realigned", realigns, 2);
		run("left", left, 1);
		run("right", right, 1);
		run("deep", recurses, 40);
		run("through the C library", sorts, 2);
		run("signal", is_interrupted, 1);
		run("thread", starts_thread, 4);
		run("driver", allocates_memory, 1);
		run("entry", records_event, 1);
		printf("%s\n", answer);
		fflush(stdout);
	}
	return 0;
}
