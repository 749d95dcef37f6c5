/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Use of the guest's GPUs. Processes without privileges read the counters and write records
 * into pipes: NVML is a library of the image, and may hang or crash, and so may reads of sysfs
 * wait.
 */
#ifndef VHPC_GPUS_H
#define VHPC_GPUS_H

#include <stdbool.h>
#include <sys/types.h>

#include "buf.h"
#include "gpurecord.h"
#include "loop.h"

/* The time between two rounds: it bounds the CPU time that they take. */
enum { GPU_ROUND_MS = 15000 };
#define NVML_LIBRARY "libnvidia-ml.so.1"

struct gpu {
    char address[GPU_ADDRESS_SIZE];
    uint64_t sum[GPU_FIGURES];
    uint64_t count[GPU_FIGURES];
    uint64_t peak; /* bytes */
};

struct gpu_reader {
    struct source source;
    pid_t pid; /* 0: none */
    bool bad;  /* it has written something that is no record */
};

struct gpus {
    struct loop *loop;
    struct gpu gpu[GPU_COUNT_MAX];
    size_t count;
    struct gpu_reader sysfs, nvml;
    char missing[128]; /* why figures are missing; empty: they are not */
};

/* Start the processes that this machine's GPUs need. If one does not start, figures are missing. */
void gpus_start(struct gpus *g, struct loop *loop, const char *sysfs, const char *library,
                int round_ms);
/* A child of this process has ended. */
void gpus_reaped(struct gpus *g, pid_t pid, int status);
void gpus_stop(struct gpus *g);
/* The fields GPU and GPU_MISSING of a reply; 0 or -ENOMEM. */
int gpus_put(const struct gpus *g, struct buf *b);

#endif
