/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters of GPUs that their drivers have in sysfs. amdgpu: gpu_busy_percent, mem_info_vram_used
 * and the power of hwmon. xe and i915: the part of the time in which the first GT was not idle, and
 * the energy of hwmon; these drivers have no memory in use there.
 */
#ifndef VHPC_GPUSYSFS_H
#define VHPC_GPUSYSFS_H

#include <stdbool.h>
#include <stddef.h>

#include "gpurecord.h"

/* Counters that only grow, as they were in the round before. */
struct gpu_before {
    char address[GPU_ADDRESS_SIZE];
    bool has_idle, has_energy;
    uint64_t idle_ms, energy_uj;
    long long at_ms;
};

struct gpu_sysfs {
    const char *root; /* where sysfs is */
    struct gpu_before before[GPU_COUNT_MAX];
    size_t count;
};

/* The GPUs of this machine, by their maker: by NVML, and by sysfs. */
void gpu_find(const char *sysfs, bool *nvidia, bool *other);
/* One round; returns the number of records. The interval is that since the round before. */
size_t gpu_sysfs_round(struct gpu_sysfs *g, long long now_ms, struct gpu_record *out, size_t most);

#endif
