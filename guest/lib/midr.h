/* SPDX-License-Identifier: Apache-2.0 */
/* The main ID register of an aarch64 processor, and who its implementer is. */
#ifndef VHPC_MIDR_H
#define VHPC_MIDR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/auxv.h>

/* Programs can read the register if the kernel has set this bit of AT_HWCAP. False: they cannot. */
static inline bool midr_read(uint64_t *midr)
{
    enum { HWCAP_OF_CPUID = 1 << 11 };
    if ((getauxval(AT_HWCAP) & HWCAP_OF_CPUID) == 0)
        return false;
    __asm__("mrs %0, midr_el1" : "=r"(*midr));
    return true;
}

/* With KVM a guest sees the implementer of the host's processor. QEMU's CPU "max" has 0, which Arm
 * reserves for software. */
static inline bool midr_is_emulated(uint64_t midr)
{
    enum { IMPLEMENTER_SHIFT = 24, IMPLEMENTER_MASK = 0xff };
    return (midr >> IMPLEMENTER_SHIFT & IMPLEMENTER_MASK) == 0;
}

#endif
