/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The InfiniBand ports of this guest, as sysfs shows them, compared with the ports of the job.
 *
 * Files and their formats: Documentation/ABI/stable/sysfs-class-infiniband of Linux.
 */
#ifndef VHPC_IBPORTS_H
#define VHPC_IBPORTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    IB_PORTS_MAX = 256,    /* ports of a guest */
    IB_KEYS_MAX = 32,      /* keys that its ports must have */
    IB_TABLE_MAX = 4096,   /* entries of a port's table */
    IB_DEVICE_MAX = 64,    /* bytes of a device's name with its NUL, as in the kernel */
    IB_PKEY_FULL = 0x8000, /* membership bit of an entry */
};

struct ib_want {
    uint64_t guid[IB_PORTS_MAX]; /* of its ports, in the order of rails */
    size_t guid_count;
    uint16_t key[IB_KEYS_MAX]; /* entries of each port's table; the first is the job's own */
    size_t key_count;
    char address[32]; /* of the first port's interface with the job's key: A.B.C.D/N; "" = none */
};

struct ib_port {
    char device[IB_DEVICE_MAX];
    unsigned number;
    unsigned index; /* of the job's key in its table */
};

struct ib_found {
    struct ib_port port[IB_PORTS_MAX]; /* in the order of the wanted GUIDs */
    size_t count;
};

/*
 * True if there are exactly the wanted InfiniBand ports, active, each with exactly the wanted keys;
 * *found has their names and key indexes. Otherwise text is one line that describes the deviations.
 * sysfs is where sysfs is mounted. Ethernet ports are not considered.
 */
bool ib_check(const char *sysfs, const struct ib_want *want, struct ib_found *found, char *text,
              size_t size);

#endif
