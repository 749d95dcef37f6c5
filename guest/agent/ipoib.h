/* SPDX-License-Identifier: Apache-2.0 */
/*
 * IP over InfiniBand with the job's key: the interface of a port with that key, and its address.
 *
 * Documentation/infiniband/ipoib.rst of Linux: the interface of a port uses entry 0 of its table; a
 * write of another key to create_child creates an interface for that key.
 */
#ifndef VHPC_IPOIB_H
#define VHPC_IPOIB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ibports.h"

enum { IPOIB_NAME_MAX = 16 }; /* IFNAMSIZ */

/*
 * Find the interface of the port with this key, or let the kernel create it. 1, or 0 if it does not
 * exist yet, with one line in text (the next call may find it).
 */
int ipoib_interface(const char *sysfs, const struct ib_port *port, uint16_t entry,
                    char name[IPOIB_NAME_MAX], char *text, size_t size);
/* A.B.C.D/N: 0, or -EINVAL. Both in network order. */
int ipoib_parse(const char *text, uint32_t *address, uint32_t *mask);
/* Set the address of an interface of this machine and bring it up: 0, or -errno with text. */
int ipoib_bring_up(const char *name, uint32_t address, uint32_t mask, char *text, size_t size);

#endif
