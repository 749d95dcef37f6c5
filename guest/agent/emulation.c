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
#include "midr.h"

bool is_emulated(void)
{
    uint64_t midr;
    return midr_read(&midr) && midr_is_emulated(midr);
}
#endif
