/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include <cpuid.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "measure.h"

#define HYPERVISOR_BIT (1U << 31U)  /* of ecx of CPUID leaf 1 */
#define HYPERVISOR_LEAF 0x40000000U /* signature in ebx, ecx, edx */
#define BRAND_LEAF 0x80000002U      /* and the two leaves after it: name of the CPU model */
#define UNKNOWN_HYPERVISOR "unknown"

/* Replace characters that are not printable, so that each value is one line. */
static void plain(char *text)
{
    for (; *text != '\0'; text++) {
        if (*text < ' ' || *text > '~') {
            *text = '?';
        }
    }
}

/* The hypervisor's signature in CPUID, such as KVMKVMKVM or TCGTCGTCGTCG (QEMU without KVM); "none"
 * on hardware. */
static void hypervisor(char signature[16])
{
    unsigned eax = 0;
    unsigned words[3] = {0};
    unsigned features = 0;
    memset(signature, 0, 16);
    if (__get_cpuid(1, &eax, &words[0], &features, &words[2]) == 0 ||
        (features & HYPERVISOR_BIT) == 0) {
        (void)snprintf(signature, 16, "none");
        return;
    }
    __cpuid(HYPERVISOR_LEAF, eax, words[0], words[1], words[2]);
    memcpy(signature, words, sizeof words);
    plain(signature);
    if (signature[0] == '\0') {
        (void)snprintf(signature, 16, UNKNOWN_HYPERVISOR);
    }
}

static void model(char name[64])
{
    unsigned words[12] = {0};
    memset(name, 0, 64);
    for (unsigned i = 0; i < 3; i++) {
        unsigned *four = words + (size_t)4 * i;
        if (__get_cpuid(BRAND_LEAF + i, &four[0], &four[1], &four[2], &four[3]) == 0) {
            (void)snprintf(name, 64, "unknown");
            return;
        }
    }
    memcpy(name, words, sizeof words);
    plain(name);
}

int machine(void)
{
    char signature[16];
    char name[64];
    struct utsname system;
    hypervisor(signature);
    model(name);
    if (uname(&system) != 0) {
        measure_complain(0, "uname failed");
        return MEASURE_FAILED;
    }
    printf("host %s\nhypervisor %s\nkernel %s\ncpus %ld\nmodel %s\n", system.nodename, signature,
           system.release, sysconf(_SC_NPROCESSORS_ONLN), name);
    return MEASURE_OK;
}
