/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libnvidia-ml.so.1: the names, structures and return codes of NVML's public
 * reference. STANDIN_HANGS, STANDIN_CRASHES: it does so when it is asked for the utilization. Two
 * GPUs; the second one is in MIG mode, so its utilization is not supported, and its power is not
 * known.
 */
#include <stdio.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };

struct pci_info {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct pair {
    unsigned int gpu, memory;
};
struct memory {
    unsigned long long total, free, used;
};

int nvmlInit_v2(void);
int nvmlDeviceGetCount_v2(unsigned int *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device);
int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *pci);
int nvmlDeviceGetUtilizationRates(void *device, struct pair *rates);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory);
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts);

static int device_of[2] = {0, 1};
static int rounds;

int nvmlInit_v2(void)
{
    return rounds++ == 0 ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    *count = 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device)
{
    *device = &device_of[index];
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *pci)
{
    *pci = (struct pci_info){.bus = *(int *)device == 0 ? 0x05 : 0xaf};
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, struct pair *rates)
{
#ifdef STANDIN_HANGS
    for (;;)
        (void)pause();
#endif
#ifdef STANDIN_CRASHES
    __builtin_trap();
#endif
    *rates = (struct pair){.gpu = 75, .memory = 1};
    return *(int *)device == 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory)
{
    (void)device;
    *memory = (struct memory){.total = 8ull << 30, .free = 5ull << 30, .used = 3ull << 30};
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts)
{
    *milliwatts = 250500;
    return *(int *)device == 0 ? SUCCESS : NOT_SUPPORTED;
}
