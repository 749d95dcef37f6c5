/* SPDX-License-Identifier: Apache-2.0 */
#include "agent.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <string.h>

bool is_emulated(void)
{
    unsigned a, b, c, d;
    char vendor[12];
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & 1U << 31) == 0)
        return false;
    __cpuid(0x40000000, a, b, c, d);
    memcpy(vendor, &b, 4);
    memcpy(vendor + 4, &c, 4);
    memcpy(vendor + 8, &d, 4);
    return memcmp(vendor, "TCGTCGTCGTCG", sizeof vendor) == 0;
}
#elif defined(__aarch64__)
#include <stdint.h>
#include <sys/auxv.h>

/*
 * With KVM a guest sees the implementer of the host's processor. QEMU's CPU "max" has 0, which Arm
 * reserves for software. Programs can read the register if the kernel has set this bit of AT_HWCAP.
 */
bool is_emulated(void)
{
    enum { HWCAP_OF_CPUID = 1 << 11, IMPLEMENTER_SHIFT = 24 };
    uint64_t midr;
    if ((getauxval(AT_HWCAP) & HWCAP_OF_CPUID) == 0)
        return false;
    __asm__("mrs %0, midr_el1" : "=r"(midr));
    return (midr >> IMPLEMENTER_SHIFT & 0xff) == 0;
}
#endif
