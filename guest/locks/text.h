/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of the kernel's tables in /proc. */
#ifndef VHPC_LOCKS_TEXT_H
#define VHPC_LOCKS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Read a number behind spaces, and its end character unless that is NUL; moves *at behind it. */
bool text_number(const char **at, int base, char end, uint64_t *value);
/* Copy a word behind spaces, cut to the size; moves *at behind it. False: there is none. */
bool text_word(const char **at, char *out, size_t size);

#endif
