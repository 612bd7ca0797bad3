/* What NCCL's host code asks of a machine with eight devices, without one: the CUDA runtime, a few functions of the driver, and NVML.
 *
 * Memory is the host's, streams and events are numbers, and every launch is over at once: it leaves the times of its channels where
 * NCCL's kernels would, and computes nothing. Numbers of attributes are those of cuda.h and driver_types.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))
enum { N_DEVICES = 8, BUS_0 = 0x10, N_CHANNELS = 64, N_STAMPS = 64, CHANNEL_NS = 5000, NOT_SUPPORTED = 3 };
enum { DRIVER_VERSION = 12020, NO_SUCH_FEATURE = 801 };
typedef unsigned long u64;

static __thread int device;
static _Atomic u64 n_objects;

/* ── The runtime: play.py puts a jump to run_NAME at the beginning of each cudaNAME in libnccl ─── */

API int run_ok(void)
{
	return 0;
}

API int run_new(void **made)
{
	*made = (void *)(0x1000 + 16 * ++n_objects);
	return 0;
}

API int run_GetDevice(int *into)
{
	*into = device;
	return 0;
}

API int run_SetDevice(int which)
{
	device = which;
	return 0;
}

API int run_StreamGetDevice(void *stream, int *into)
{
	(void)stream;
	return run_GetDevice(into);
}

API int run_GetDeviceCount(int *into)
{
	*into = N_DEVICES;
	return 0;
}

API int run_DriverGetVersion(int *into)
{
	*into = DRIVER_VERSION;
	return 0;
}

API int run_RuntimeGetVersion(int *into)
{
	return run_DriverGetVersion(into);
}

API int run_DeviceGetAttribute(int *into, int what, int which)
{
	static const int values[128] = {[8] = 48 << 10, [10] = 32, [16] = 132, [75] = 9, [97] = 227 << 10};

	(void)which;
	*into = what >= 0 && what < 128 ? values[what] : 0;
	return 0;
}

API int run_DeviceGetPCIBusId(char *into, int n_bytes, int which)
{
	snprintf(into, n_bytes, "0000:%02x:00.0", BUS_0 + which);
	return 0;
}

API int run_GetDeviceProperties_v2(char *into, int which)
{
	memset(into, 0, 512);
	into[256] = 1 + which; /* of its UUID */
	return 0;
}

API int run_DeviceCanAccessPeer(int *into)
{
	*into = 0;
	return 0;
}

API int run_Malloc(void **into, u64 n_bytes)
{
	if (posix_memalign(into, 1 << 16, n_bytes ? n_bytes : 1))
		return 2;
	memset(*into, 0, n_bytes);
	return 0;
}

/* NCCL's counters of begun and ended work: the first two allocations of this size by the thread that makes the communicator. */
struct stamp {
	u64 counter, ns;
};
typedef struct stamp stamps[N_CHANNELS][N_STAMPS];
static __thread stamps *counters[2];
static __thread unsigned n_counters;
static __thread u64 n_works[N_CHANNELS];

API int run_HostAlloc(void **into, u64 n_bytes, unsigned flags)
{
	(void)flags;
	if (run_Malloc(into, n_bytes))
		return 2;
	if (n_bytes == sizeof(stamps) && n_counters < 2)
		counters[n_counters++] = *into;
	return 0;
}

API int run_HostGetDevicePointer(void **into, void *host)
{
	*into = host;
	return 0;
}

API int run_MemcpyAsync(void *to, const void *from, u64 n_bytes)
{
	memcpy(to, from, n_bytes);
	return 0;
}

API int run_Memcpy(void *to, const void *from, u64 n_bytes)
{
	return run_MemcpyAsync(to, from, n_bytes);
}

API int run_MemsetAsync(void *to, int value, u64 n_bytes)
{
	memset(to, value, n_bytes);
	return 0;
}

API int run_Memset(void *to, int value, u64 n_bytes)
{
	return run_MemsetAsync(to, value, n_bytes);
}

API int run_MemGetInfo(u64 *free_bytes, u64 *all_bytes)
{
	*free_bytes = *all_bytes = 80ul << 30;
	return 0;
}

API int run_PointerGetAttributes(u64 *into, u64 pointer)
{
	into[0] = 2; /* memory of the device */
	into[1] = into[2] = pointer;
	return 0;
}

API int run_FuncGetAttributes(char *into)
{
	memset(into, 0, 56);
	return 0;
}

API int run_GetSymbolAddress(void **into)
{
	static char symbol[1 << 16];

	*into = symbol;
	return 0;
}

API int run_StreamIsCapturing(void *stream, int *into)
{
	(void)stream;
	*into = 0;
	return 0;
}

API int run_StreamGetCaptureInfo_v2(void *stream, int *status, u64 *id, void **graph)
{
	(void)stream;
	*status = 0;
	if (id)
		*id = 0;
	if (graph)
		*graph = NULL;
	return 0;
}

API int run_StreamGetCaptureInfo_v3(void *stream, int *status, u64 *id, void **graph)
{
	return run_StreamGetCaptureInfo_v2(stream, status, id, graph);
}

API int run_DeviceGetStreamPriorityRange(int *least, int *greatest)
{
	*least = *greatest = 0;
	return 0;
}

API const char *run_GetErrorString(int code)
{
	(void)code;
	return "an error of no device";
}

/* ── The driver, whose functions NCCL asks the runtime for ─────────────────── */

static u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ul + now.tv_nsec;
}

/* The second word of a kernel's arguments is the mask of its channels (struct ncclDevKernelArgs). Channel c takes CHANNEL_NS × (c + 1). */
static int launch(const u64 *arguments)
{
	u64 begun_ns = now_ns();

	if (!arguments || !counters[1])
		return 0;
	for (int c = 0; c < N_CHANNELS; c++) {
		u64 work = n_works[c] + 1;
		struct stamp *begun = &(*counters[0])[c][work % N_STAMPS], *ended = &(*counters[1])[c][work % N_STAMPS];

		if (!(arguments[1] >> c & 1))
			continue;
		n_works[c] = work;
		begun->ns = begun_ns;
		__atomic_store_n(&begun->counter, work, __ATOMIC_SEQ_CST);
		ended->ns = begun_ns + CHANNEL_NS * (c + 1);
		__atomic_store_n(&ended->counter, work, __ATOMIC_SEQ_CST);
	}
	return 0;
}

static int driver_launch(void *config, void *function, void **arguments, void **extra)
{
	(void)config, (void)function;
	return launch(extra ? extra[1] : arguments[0]);
}

API int run_LaunchKernelExC(void *config, void *function, void **arguments)
{
	return driver_launch(config, function, arguments, NULL);
}

static int driver_ok(void)
{
	return 0;
}

static int driver_refuse(void)
{
	return NO_SUCH_FEATURE;
}

static int driver_attribute(int *into)
{
	*into = 0;
	return 0;
}

static int driver_device(int *into, int which)
{
	*into = which;
	return 0;
}

static int driver_uuid(char *into, int which)
{
	memset(into, 0, 16);
	into[0] = 1 + which;
	return 0;
}

static int driver_error(int code, const char **into)
{
	*into = run_GetErrorString(code);
	return 0;
}

API int run_GetDriverEntryPoint(const char *name, void **into, u64 flags, int *status)
{
	static const struct {
		const char *begins;
		void *function;
	} known[] = {
		{"cuDeviceGetAttribute", driver_attribute}, {"cuDeviceGetUuid", driver_uuid},
		{"cuDeviceGet", driver_device},		   {"cuDriverGetVersion", run_DriverGetVersion},
		{"cuGetError", driver_error},		   {"cuCtxGetCurrent", run_new},
		{"cuLaunchKernelEx", driver_launch},	   {"cuMem", driver_refuse},
		{"cuMulticast", driver_refuse},		   {"", driver_ok},
	};
	unsigned i = 0;

	(void)flags;
	while (strncmp(name, known[i].begins, strlen(known[i].begins)))
		i++;
	*into = known[i].function;
	if (status)
		*status = 0;
	return 0;
}

API int run_GetDriverEntryPointByVersion(const char *name, void **into, unsigned version, u64 flags, int *status)
{
	(void)version;
	return run_GetDriverEntryPoint(name, into, flags, status);
}

/* ── NVML: this library is found under its name too. A device is its number and one. ─────────── */

#define NVML(name, ...) API int nvml##name(__VA_ARGS__)
#define REFUSES(name)                                                                                                  \
	NVML(name, void)                                                                                               \
	{                                                                                                              \
		return NOT_SUPPORTED;                                                                                  \
	}

NVML(Init, void)
{
	return 0;
}

NVML(Shutdown, void)
{
	return 0;
}

NVML(DeviceGetCount, unsigned *into)
{
	*into = N_DEVICES;
	return 0;
}

NVML(DeviceGetCount_v2, unsigned *into)
{
	return nvmlDeviceGetCount(into);
}

NVML(DeviceGetHandleByIndex, unsigned index, u64 *into)
{
	*into = index + 1;
	return 0;
}

NVML(DeviceGetHandleByPciBusId, const char *bus, u64 *into)
{
	*into = strtoul(strchr(bus, ':') + 1, NULL, 16) - BUS_0 + 1;
	return 0;
}

NVML(DeviceGetIndex, u64 which, unsigned *into)
{
	*into = which - 1;
	return 0;
}

NVML(DeviceGetMinorNumber, u64 which, unsigned *into)
{
	return nvmlDeviceGetIndex(which, into);
}

NVML(DeviceGetCudaComputeCapability, u64 which, int *major, int *minor)
{
	(void)which;
	*major = 9;
	*minor = 0;
	return 0;
}

NVML(DeviceGetP2PStatus, u64 one, u64 other, int what, int *into)
{
	(void)one, (void)other, (void)what;
	*into = 1; /* not supported by the chipset */
	return 0;
}

API const char *nvmlErrorString(int code)
{
	return run_GetErrorString(code);
}

REFUSES(DeviceGetNvLinkState)
REFUSES(DeviceGetNvLinkRemotePciInfo)
REFUSES(DeviceGetNvLinkCapability)
REFUSES(DeviceGetFieldValues)
REFUSES(DeviceGetPcieLinkMaxSpeed)
REFUSES(DeviceGetCurrPcieLinkGeneration)
REFUSES(DeviceGetCurrPcieLinkWidth)
REFUSES(DeviceGetPciInfoExt)
REFUSES(DeviceGetPciInfo_v3)
