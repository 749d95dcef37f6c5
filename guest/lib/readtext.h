/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel's small files, as in /proc and cgroups: their text, words and numbers. */
#ifndef VHPC_READTEXT_H
#define VHPC_READTEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Read a file, cut to size - 1 bytes, and end it with a NUL. Its length, or -errno. */
ssize_t read_text(const char *path, char *out, size_t size);
/* Skip spaces, read a number and its end character unless that is NUL, and set *at to what follows.
 * False: *at is as before. */
bool text_number(const char **at, int base, char end, uint64_t *value);
/* Read a number of at most `most` that the text begins with, up to the end of its line. */
bool text_is_number(const char *text, int base, uint64_t most, uint64_t *value);
/* Skip spaces, copy the next word (at most size - 1 bytes), and set *at to its end.
 * False: no word is left. */
bool text_word(const char **at, char *out, size_t size);

#endif
