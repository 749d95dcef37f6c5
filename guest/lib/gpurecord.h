/* SPDX-License-Identifier: Apache-2.0 */
/* Records of a process that reads the counters of GPUs: one per GPU and round, in its pipe. */
#ifndef VHPC_GPURECORD_H
#define VHPC_GPURECORD_H

#include <stdint.h>

enum gpu_figure {
    GPU_BUSY,   /* hundredths of a per cent */
    GPU_MEMORY, /* bytes in use */
    GPU_POWER,  /* milliwatts */
    GPU_FIGURES,
};

enum { GPU_ADDRESS_SIZE = 16, GPU_COUNT_MAX = 64 };

struct gpu_record {
    char address[GPU_ADDRESS_SIZE]; /* DDDD:BB:DD.F of PCI, in this guest */
    uint64_t has;                   /* bit N: figure N */
    uint64_t value[GPU_FIGURES];
};

/* Exit status of the process that loads NVML. */
enum { NVML_NO_LIBRARY = 3, NVML_NO_FUNCTION = 4 };
/* One round takes NVML less than this; then SIGALRM ends the process. */
enum { NVML_ROUND_S = 10 };

#endif
