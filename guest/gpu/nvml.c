/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the counters of NVIDIA's GPUs by NVML, a library of the image: vhpc-nvml LIBRARY
 * MILLISECONDS writes records (gpurecord.h) to standard output until it is killed.
 *
 * The agent is static, and must survive this library, so this is a program of its own, which is a
 * part of the agent's file. It needs only functions that every glibc has, by the symbol versions of
 * the first one, so that it runs in older images than that in which it was built.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "gpurecord.h"

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n");
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n bl begin\n");
#else
#error "no _start for this processor"
#endif
__asm__(".symver dlopen, dlopen@" BASE);
__asm__(".symver dlsym, dlsym@" BASE);

/* As NVML's reference declares them. */
struct pci_info {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct utilization {
    unsigned int gpu, memory; /* per cent */
};
struct memory {
    unsigned long long total, free, used; /* bytes */
};

static struct {
    int (*init)(void);
    int (*count)(unsigned int *);
    int (*handle)(unsigned int, void **);
    int (*pci)(void *, struct pci_info *);
    int (*utilization)(void *, struct utilization *);
    int (*memory)(void *, struct memory *);
    int (*power)(void *, unsigned int *);
} nvml;

static const struct {
    const char *name;
    void *slot;
} functions[] = {
    {"nvmlInit_v2", &nvml.init},
    {"nvmlDeviceGetCount_v2", &nvml.count},
    {"nvmlDeviceGetHandleByIndex_v2", &nvml.handle},
    {"nvmlDeviceGetPciInfo_v3", &nvml.pci},
    {"nvmlDeviceGetUtilizationRates", &nvml.utilization},
    {"nvmlDeviceGetMemoryInfo", &nvml.memory},
    {"nvmlDeviceGetPowerUsage", &nvml.power},
};

static void load(const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        _exit(NVML_NO_LIBRARY);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(handle, functions[i].name);
        if (found == NULL)
            _exit(NVML_NO_FUNCTION);
        memcpy(functions[i].slot, &found, sizeof found);
    }
}

static void put(struct gpu_record *r, enum gpu_figure figure, uint64_t value)
{
    r->has |= (uint64_t)1 << figure;
    r->value[figure] = value;
}

static void write_hex(char *out, unsigned int value, int digits)
{
    for (int i = digits - 1; i >= 0; i--, value >>= 4)
        out[i] = "0123456789abcdef"[value & 15];
}

static void one(void *device)
{
    struct gpu_record r = {.address = "0000:00:00.0"};
    struct pci_info pci = {0};
    struct utilization busy;
    struct memory memory;
    unsigned int milliwatts;
    if (nvml.pci(device, &pci) != 0)
        return;
    write_hex(r.address, pci.domain, 4);
    write_hex(r.address + 5, pci.bus, 2);
    write_hex(r.address + 8, pci.device, 2);
    if (nvml.utilization(device, &busy) == 0)
        put(&r, GPU_BUSY, (uint64_t)busy.gpu * 100);
    if (nvml.memory(device, &memory) == 0)
        put(&r, GPU_MEMORY, memory.used);
    if (nvml.power(device, &milliwatts) == 0)
        put(&r, GPU_POWER, milliwatts);
    if (write(STDOUT_FILENO, &r, sizeof r) != (ssize_t)sizeof r)
        _exit(1);
}

/* The words of the stack at the start of a process: argc, then argv. */
_Noreturn void begin(const long *stack);

_Noreturn void begin(const long *stack)
{
    char *const *argv = (char *const *)(stack + 1);
    int ready = 0;
    if (stack[0] != 3)
        _exit(2);
    /* Started by a descriptor, which the kernel names a process after: "3", "memfd:vhpc-nvml". */
    (void)prctl(PR_SET_NAME, "vhpc-nvml", 0, 0, 0);
    long pause = strtol(argv[2], NULL, 10);
    struct timespec rest = {.tv_sec = pause / 1000, .tv_nsec = pause % 1000 * 1000000};
    (void)alarm(NVML_ROUND_S);
    load(argv[1]);
    for (;;) {
        unsigned int count = 0;
        (void)alarm(NVML_ROUND_S);
        ready = ready || nvml.init() == 0; /* not before the image has loaded its driver */
        if (ready && nvml.count(&count) == 0)
            for (unsigned int i = 0; i < count && i < GPU_COUNT_MAX; i++) {
                void *device;
                if (nvml.handle(i, &device) == 0)
                    one(device);
            }
        (void)alarm(0);
        (void)nanosleep(&rest, NULL);
    }
}
