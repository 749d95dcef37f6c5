/* SPDX-License-Identifier: Apache-2.0 */
/* Bounded, checked text: the user's input, and messages. */
#ifndef VHPC_SPANK_TEXT_H
#define VHPC_SPANK_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Room for one line of explanation: what, why, what to do. */
#define VHPC_WHY_SIZE 512

/* Length of a value shown in a message; longer ones are cut. */
#define VHPC_SHOWN_SIZE 81

/*
 * True if the bytes are valid UTF-8 without control characters (C0, DEL, C1) and without
 * U+2028/U+2029: text that stays on one line in a terminal, a script's environment and a key=value
 * file.
 */
bool vhpc_text_is_plain(const char *text, size_t length);

/*
 * Copy text for a message: each byte that is not printable ASCII or part of plain UTF-8 becomes
 * '?', and "..." replaces what does not fit. size >= 4.  Returns out.
 */
const char *vhpc_text_shown(const char *text, char *out, size_t size);

/*
 * Read a decimal number without sign, blanks or other leading characters.  False if there is no
 * digit, anything else follows, or the number exceeds max.
 */
bool vhpc_text_number(const char *text, size_t length, uint64_t max, uint64_t *number);

#endif
