/* SPDX-License-Identifier: Apache-2.0 */
/*
 * IP over InfiniBand on the job's key: the interface of a port that has it,
 * and its address.
 *
 * Documentation/infiniband/ipoib.rst of Linux: the interface of a port uses
 * entry 0 of its table; others come into being when their key is written into
 * create_child.
 */
#ifndef VHPC_IPOIB_H
#define VHPC_IPOIB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ibports.h"

enum { IPOIB_NAME_MAX = 16 }; /* IFNAMSIZ */

/*
 * The interface of the port whose key this entry is; one is made where there
 * is none. 1, 0 when it is not there yet, with one line in text that says why
 * (the next call may find it).
 */
int ipoib_interface(const char *sysfs, const struct ib_port *port, uint16_t entry,
                    char name[IPOIB_NAME_MAX], char *text, size_t size);
/* A.B.C.D/N: 0, or -EINVAL. Both in network order. */
int ipoib_parse(const char *text, uint32_t *address, uint32_t *mask);
/* Give an interface of this machine its address, and bring it up: 0, or -errno with text. */
int ipoib_bring_up(const char *name, uint32_t address, uint32_t mask, char *text, size_t size);

#endif
