/* libnvidia-ml: two devices that tell fixed numbers, for the binding and the decoding of what it gives.
 *
 * Our own, from the public prototypes (nvml.h of CUDA 12.9). Device 0 has everything; device 1 has neither NVLink, ECC,
 * MIG nor a process's memory, and says so as the driver does. Each look at a violation counter finds it grown by what
 * GPUSIM_THROTTLE_NS says; GPUSIM_XID is reported once. The driver's version is "gpusim", so that nobody takes it for one.
 */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { N_DEVICES = 2, N_LINKS = 3 };

struct nvml_device {
	unsigned index;
	u64 held_ns[12];
};

struct nvml_memory {
	u64 total, free, used;
};

struct nvml_rates {
	unsigned gpu, memory;
};

struct nvml_violation {
	u64 reference_us, violation_ns;
};

struct nvml_process {
	unsigned pid;
	u64 bytes;
	unsigned gpu_instance, compute_instance;
};

struct nvml_event {
	struct nvml_device *device;
	u64 type, data;
	unsigned gpu_instance, compute_instance;
};

static struct nvml_device devices[N_DEVICES] = {{.index = 0}, {.index = 1}};
static int n_registered, is_told;

static u64 setting(const char *name, u64 otherwise)
{
	const char *text = getenv(name);

	return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

API int nvmlInitWithFlags(unsigned flags)
{
	return flags ? INVALID_ARGUMENT : OK;
}

API int nvmlShutdown(void)
{
	return OK;
}

API int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
	snprintf(text, size, "gpusim");
	return OK;
}

API const char *nvmlErrorString(int code)
{
	return code == NOT_SUPPORTED ? "Not Supported" : code == TIMEOUT ? "Timeout" : "Error";
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
	*count = N_DEVICES;
	return OK;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct nvml_device **device)
{
	if (index >= N_DEVICES)
		return INVALID_ARGUMENT;
	*device = &devices[index];
	return OK;
}

API int nvmlDeviceGetUUID(struct nvml_device *device, char *text, unsigned size)
{
	snprintf(text, size, "GPU-sim-%u", device->index);
	return OK;
}

API int nvmlDeviceGetName(struct nvml_device *device, char *text, unsigned size)
{
	snprintf(text, size, "Simulated GPU %u", device->index);
	return OK;
}

API int nvmlDeviceGetMemoryInfo(struct nvml_device *device, struct nvml_memory *memory)
{
	memory->total = 80ull << 30;
	memory->used = (7ull + device->index) << 30;
	memory->free = memory->total - memory->used;
	return OK;
}

API int nvmlDeviceGetUtilizationRates(struct nvml_device *device, struct nvml_rates *rates)
{
	rates->gpu = 97 - device->index;
	rates->memory = 41;
	return OK;
}

API int nvmlDeviceGetClockInfo(struct nvml_device *device, int kind, unsigned *mhz)
{
	*mhz = kind == 1 ? 1410 : kind == 2 ? 1593 : 0;
	return device->index < N_DEVICES ? OK : INVALID_ARGUMENT;
}

API int nvmlDeviceGetTemperature(struct nvml_device *device, int sensor, unsigned *celsius)
{
	*celsius = 61 + device->index;
	return sensor ? INVALID_ARGUMENT : OK;
}

API int nvmlDeviceGetPowerUsage(struct nvml_device *device, unsigned *milliwatts)
{
	*milliwatts = 399000 + device->index;
	return OK;
}

API int nvmlDeviceGetCurrentClocksEventReasons(struct nvml_device *device, u64 *reasons)
{
	*reasons = device->index ? 0x1 : 0x44; /* idle; software power cap and hardware thermal slowdown */
	return OK;
}

API int nvmlDeviceGetViolationStatus(struct nvml_device *device, int policy, struct nvml_violation *told)
{
	if (device->index || policy < 0 || policy >= 12)
		return NOT_SUPPORTED;
	device->held_ns[policy] += policy ? 0 : setting("GPUSIM_THROTTLE_NS", 0);
	told->reference_us = 1;
	told->violation_ns = device->held_ns[policy];
	return OK;
}

API int nvmlDeviceGetTotalEccErrors(struct nvml_device *device, int kind, int counter, u64 *count)
{
	if (device->index)
		return NOT_SUPPORTED;
	*count = counter ? 0 : kind ? setting("GPUSIM_ECC", 0) : 5;
	return OK;
}

API int nvmlDeviceGetNvLinkState(struct nvml_device *device, unsigned link, unsigned *is_active)
{
	if (device->index || link >= N_LINKS)
		return NOT_SUPPORTED;
	*is_active = link != 1;
	return OK;
}

API int nvmlDeviceGetNvLinkErrorCounter(struct nvml_device *device, unsigned link, int kind, u64 *count)
{
	if (device->index || link >= N_LINKS || kind > 2)
		return NOT_SUPPORTED;
	*count = link == 2 ? 7 : 0;
	return OK;
}

API int nvmlDeviceGetCurrPcieLinkGeneration(struct nvml_device *device, unsigned *generation)
{
	*generation = 5 - device->index;
	return OK;
}

API int nvmlDeviceGetCurrPcieLinkWidth(struct nvml_device *device, unsigned *width)
{
	*width = device->index ? 8 : 16;
	return OK;
}

API int nvmlDeviceGetPcieReplayCounter(struct nvml_device *device, unsigned *count)
{
	*count = 11 * device->index;
	return OK;
}

API int nvmlDeviceGetMigMode(struct nvml_device *device, unsigned *current, unsigned *pending)
{
	*current = *pending = 0;
	return device->index ? NOT_SUPPORTED : OK;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(struct nvml_device *device, unsigned *count, struct nvml_process *found)
{
	if (*count < 1) {
		*count = 1;
		return INSUFFICIENT_SIZE;
	}
	*count = 1;
	found->pid = 4711 + device->index;
	found->bytes = device->index ? ~0ull : 3ull << 30;
	return OK;
}

API int nvmlEventSetCreate(void **events)
{
	*events = &n_registered;
	return OK;
}

API int nvmlDeviceRegisterEvents(struct nvml_device *device, u64 kinds, void *events)
{
	(void)events;
	n_registered += kinds == 8 && device;
	return OK;
}

API int nvmlEventSetWait_v2(void *events, struct nvml_event *event, unsigned timeout_ms)
{
	(void)events;
	(void)timeout_ms;
	if (is_told || n_registered < N_DEVICES || !setting("GPUSIM_XID", 0))
		return TIMEOUT;
	is_told = 1;
	event->device = &devices[1];
	event->type = 8;
	event->data = setting("GPUSIM_XID", 0);
	return OK;
}

API int nvmlEventSetFree(void *events)
{
	(void)events;
	return OK;
}
