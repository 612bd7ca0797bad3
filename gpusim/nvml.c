/* libnvidia-ml: two devices that tell fixed numbers, for the binding and the decoding of what it gives.
 *
 * Our own, from the public prototypes (nvml.h of CUDA 12.9). Device 0 has everything; device 1 has neither NVLink, ECC,
 * MIG, field values, PCIe throughput nor a process's memory, and says so as the driver does. Each look at a violation
 * counter finds it grown by what GPUSIM_THROTTLE_NS says; GPUSIM_XID is reported once. GPUSIM_MIG=1 cuts device 0 into two
 * instances with a gap between their indexes; GPUSIM_NVML_NEW=1 makes it one of those that tell violations and NVLink errors
 * as field values only. The driver's version is "gpusim", so that nobody takes it for one.
 */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { N_DEVICES = 2, N_LINKS = 3, MOST_INSTANCES = 4 };
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, UNSIGNED_SHORT = 6 };

struct nvml_device {
	unsigned index, gpu_instance, compute_instance, gib; /* gib: of an instance; 0 in a whole device */
	u64 held_ns[12];
};

struct nvml_memory {
	u64 total, free, used;
};

struct nvml_memory_v2 {
	unsigned version;
	u64 total, reserved, free, used;
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

struct nvml_field {
	unsigned number, scope;
	long long timestamp_us, latency_us;
	int type, outcome;
	union {
		unsigned ui;
		unsigned long long ull;
		unsigned short us;
	} value;
};

static struct nvml_device devices[N_DEVICES] = {{.index = 0}, {.index = 1}};
static struct nvml_device instances[MOST_INSTANCES] = {
	{.gpu_instance = 1, .compute_instance = 0, .gib = 40},
	{.gib = 0}, /* none has this index */
	{.gpu_instance = 5, .compute_instance = 1, .gib = 20},
};
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
	if (device->gib)
		snprintf(text, size, "MIG-sim-%u-%u", device->gpu_instance, device->compute_instance);
	else
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
	memory->total = (device->gib ? device->gib : 80ull) << 30;
	memory->used = (device->gib ? device->gpu_instance : 7ull + device->index) << 30;
	memory->free = memory->total - memory->used;
	return OK;
}

API int nvmlDeviceGetMemoryInfo_v2(struct nvml_device *device, struct nvml_memory_v2 *memory)
{
	struct nvml_memory whole;

	nvmlDeviceGetMemoryInfo(device, &whole);
	memory->total = whole.total;
	memory->reserved = 1ull << 30;
	memory->free = whole.free;
	memory->used = whole.used - memory->reserved;
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
	if (device->index || policy < 0 || policy >= 12 || setting("GPUSIM_NVML_NEW", 0))
		return NOT_SUPPORTED;
	device->held_ns[policy] += policy ? 0 : setting("GPUSIM_THROTTLE_NS", 0);
	device->held_ns[2] = 200; /* sync boost */
	device->held_ns[5] = 500; /* reliability */
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
	if (device->index || link >= N_LINKS || kind > 3 || setting("GPUSIM_NVML_NEW", 0))
		return NOT_SUPPORTED;
	*count = link == 2 ? 7 + kind : link;
	return OK;
}

static int put_field(struct nvml_field *field)
{
	const int is_new = setting("GPUSIM_NVML_NEW", 0) != 0;
	const unsigned number = field->number;

	field->value.ull = ~0ull; /* what is beyond the type's own width is not a value */
	if (number >= 74 && number <= 79) { /* time held down, by policy */
		field->type = UNSIGNED_LONG_LONG;
		field->value.ull = 1000 + number;
		return is_new ? OK : NOT_SUPPORTED;
	}
	if (number == 270 || number == 271) { /* the same, by the hardware */
		field->type = UNSIGNED_LONG_LONG;
		field->value.ull = number == 270 ? 5000000000ull : 0;
		return OK;
	}
	if (number == 138 || number == 139) { /* NVLink payload in KiB; of all links at the greatest scope */
		field->type = UNSIGNED_LONG_LONG;
		field->value.ull = field->scope == ~0u ? 6000000000ull + number : number;
		return OK;
	}
	if (number >= 173 && number <= 182) { /* PCIe errors; those of the lanes are not told */
		field->type = number == 176 ? UNSIGNED_SHORT : UNSIGNED_INT;
		if (number == 176)
			field->value.us = 3;
		else
			field->value.ui = number == 173 ? 4000000000u : 0;
		return OK;
	}
	if ((number == 208 || number == 215) && is_new && field->scope < N_LINKS) { /* NVLink 5 errors of a link */
		field->type = UNSIGNED_LONG_LONG;
		field->value.ull = number == 208 ? 10 * field->scope : 0;
		return OK;
	}
	return NOT_SUPPORTED;
}

API int nvmlDeviceGetFieldValues(struct nvml_device *device, int n_fields, struct nvml_field *fields)
{
	for (int i = 0; i < n_fields; i++)
		fields[i].outcome = device->index ? NOT_SUPPORTED : put_field(&fields[i]);
	return OK;
}

API int nvmlDeviceGetPcieThroughput(struct nvml_device *device, int counter, unsigned *kb_s)
{
	if (device->index)
		return NOT_SUPPORTED;
	*kb_s = counter ? 0 : 12000000; /* sends only */
	return OK;
}

API int nvmlDeviceGetMaxPcieLinkGeneration(struct nvml_device *device, unsigned *generation)
{
	(void)device;
	*generation = 5;
	return OK;
}

API int nvmlDeviceGetMaxPcieLinkWidth(struct nvml_device *device, unsigned *width)
{
	(void)device;
	*width = 16;
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
	*current = *pending = setting("GPUSIM_MIG", 0) != 0;
	return device->index ? NOT_SUPPORTED : OK;
}

API int nvmlDeviceGetMaxMigDeviceCount(struct nvml_device *device, unsigned *count)
{
	*count = device->index ? 0 : MOST_INSTANCES;
	return OK;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(struct nvml_device *device, unsigned index, struct nvml_device **instance)
{
	if (device->index || index >= MOST_INSTANCES)
		return INVALID_ARGUMENT;
	*instance = &instances[index];
	return instances[index].gib ? OK : NOT_FOUND;
}

API int nvmlDeviceGetGpuInstanceId(struct nvml_device *device, unsigned *number)
{
	*number = device->gpu_instance;
	return device->gib ? OK : NOT_SUPPORTED;
}

API int nvmlDeviceGetComputeInstanceId(struct nvml_device *device, unsigned *number)
{
	*number = device->compute_instance;
	return device->gib ? OK : NOT_SUPPORTED;
}

/* A whole device tells of one process; cut, of the same one in both instances, which is 2 GiB and 1 GiB. */
API int nvmlDeviceGetComputeRunningProcesses_v3(struct nvml_device *device, unsigned *count, struct nvml_process *found)
{
	const unsigned n_found = !device->gib && !device->index && setting("GPUSIM_MIG", 0) ? 2 : 1;

	if (device->gpu_instance == 5)
		return NO_PERMISSION;
	if (*count < n_found) {
		*count = n_found;
		return INSUFFICIENT_SIZE;
	}
	*count = n_found;
	for (unsigned i = 0; i < n_found; i++) {
		found[i].pid = 4711 + device->index;
		found[i].bytes = device->index ? ~0ull : device->gib ? 2ull << 30 : n_found == 2 ? (2ull - i) << 30 : 3ull << 30;
	}
	return OK;
}

/* Clients of MPS: the process that the other list has too, and one more. */
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct nvml_device *device, unsigned *count, struct nvml_process *found)
{
	if (device->index || device->gib)
		return NOT_SUPPORTED;
	if (*count < 2) {
		*count = 2;
		return INSUFFICIENT_SIZE;
	}
	*count = 2;
	found[0].pid = 4711;
	found[0].bytes = 9ull << 30;
	found[1].pid = 4800;
	found[1].bytes = 1ull << 30;
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
