/* SPDX-License-Identifier: Apache-2.0 */
/* Why execve() does not find a program whose file exists: an interpreter of it is missing. */
#ifndef VHPC_INTERPRETER_H
#define VHPC_INTERPRETER_H

#include <stdbool.h>
#include <stddef.h>

enum interpreter_kind {
    INTERPRETER_NONE,   /* needs none, or is not readable */
    INTERPRETER_SCRIPT, /* begins with "#!" */
    INTERPRETER_ELF     /* dynamically linked, of 32 or 64 bits */
};

/*
 * Read which interpreter a program's open file names. A script names it in the rest of its first
 * line, with arguments; an ELF file names its dynamic loader. The text is cut to size - 1 bytes.
 */
enum interpreter_kind interpreter_of(int fd, char *name, size_t size);

/*
 * Say why execve(path) failed with ENOENT: in slurmstepd's words, and behind them the file that is
 * missing if those words do not have it. False, and text as it was: no interpreter is the cause.
 */
bool interpreter_describe(const char *path, char *text, size_t size);

#endif
