/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "measure.h"

#define SIZE 64 /* of a value */

#if defined(__x86_64__)
#include <cpuid.h>

#define HYPERVISOR_BIT (1U << 31U)  /* of ecx of CPUID leaf 1 */
#define HYPERVISOR_LEAF 0x40000000U /* signature in ebx, ecx, edx */
#define BRAND_LEAF 0x80000002U      /* and the two leaves after it: name of the CPU model */

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
static void hypervisor(char name[SIZE])
{
    unsigned eax = 0;
    unsigned words[3] = {0};
    unsigned features = 0;
    memset(name, 0, SIZE);
    if (__get_cpuid(1, &eax, &words[0], &features, &words[2]) == 0 ||
        (features & HYPERVISOR_BIT) == 0) {
        (void)snprintf(name, SIZE, "none");
        return;
    }
    __cpuid(HYPERVISOR_LEAF, eax, words[0], words[1], words[2]);
    memcpy(name, words, sizeof words);
    plain(name);
    if (name[0] == '\0') {
        (void)snprintf(name, SIZE, "unknown");
    }
}

static void model(char name[SIZE])
{
    unsigned words[12] = {0};
    memset(name, 0, SIZE);
    for (unsigned i = 0; i < 3; i++) {
        unsigned *four = words + (size_t)4 * i;
        if (__get_cpuid(BRAND_LEAF + i, &four[0], &four[1], &four[2], &four[3]) == 0) {
            (void)snprintf(name, SIZE, "unknown");
            return;
        }
    }
    memcpy(name, words, sizeof words);
    plain(name);
}
#elif defined(__aarch64__)
#include <inttypes.h>
#include <stdbool.h>

#include "midr.h"

/* What this program says of a guest that QEMU emulates, on each architecture. */
#define EMULATED "TCGTCGTCGTCG"

/* Whether a property of the firmware, without its final zero or line feed, is a text. */
static bool is(const char *path, const char *text)
{
    char found[SIZE] = "";
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    size_t size = fread(found, 1, sizeof found - 1, file);
    (void)fclose(file);
    found[size] = '\0';
    found[strcspn(found, "\n")] = '\0';
    return strcmp(found, text) == 0;
}

/* The architecture has no CPUID, so no instruction names the hypervisor. QEMU's machine "virt" has
 * its name in the device tree, or with UEFI in the SMBIOS. Only a kernel that the firmware started
 * with the virtualization extensions has /dev/kvm: on hardware, or in a guest that has guests. */
static void hypervisor(char name[SIZE])
{
    uint64_t midr = 0;
    const char *found = "";
    if (midr_read(&midr) && midr_is_emulated(midr)) {
        found = EMULATED;
    } else if (is("/sys/firmware/devicetree/base/compatible", "linux,dummy-virt") ||
               is("/sys/class/dmi/id/sys_vendor", "QEMU")) {
        found = "QEMU";
    } else if (access("/dev/kvm", F_OK) == 0) {
        found = "none";
    }
    (void)snprintf(name, SIZE, "%s", found);
}

/* The kernel has no names of models, lscpu(1) has a table. */
static void model(char name[SIZE])
{
    uint64_t midr = 0;
    if (midr_read(&midr)) {
        (void)snprintf(name, SIZE, "MIDR 0x%08" PRIx64, midr);
    } else {
        (void)snprintf(name, SIZE, "unknown");
    }
}
#endif

int machine(void)
{
    char found[SIZE];
    char name[SIZE];
    struct utsname system;
    hypervisor(found);
    model(name);
    if (uname(&system) != 0) {
        measure_complain(0, "uname failed");
        return MEASURE_FAILED;
    }
    printf("host %s\nkernel %s\ncpus %ld\nmodel %s\n", system.nodename, system.release,
           sysconf(_SC_NPROCESSORS_ONLN), name);
    if (found[0] != '\0') { /* else this machine does not say */
        printf("hypervisor %s\n", found);
    }
    return MEASURE_OK;
}
