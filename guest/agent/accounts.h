/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of /etc/passwd and /etc/group: name:password:id:... */
#ifndef VHPC_ACCOUNTS_H
#define VHPC_ACCOUNTS_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Put an entry into the file at path. An entry with the same name is removed. One with the same
 * id stays, after the new entry. So lookups by name and by id both return the new entry.
 * 0 or -errno.
 */
int accounts_put(const char *path, const char *name, uint32_t id, const char *line);

/* Whether a file has an entry of this name. */
bool accounts_has(const char *path, const char *name);
/* The number in the third field of the entry of this name; 0: no entry. */
uint32_t accounts_number(const char *path, const char *name);

#endif
