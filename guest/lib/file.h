/* SPDX-License-Identifier: Apache-2.0 */
/* Writing files. */
#ifndef VHPC_FILE_H
#define VHPC_FILE_H

#include <stddef.h>
#include <sys/types.h>

#include "buf.h"

/*
 * Write a new file. An earlier file at path is removed, and a link there is not followed. 0 or
 * -errno.
 */
int write_file(const char *path, mode_t mode, const char *content);
int write_file_data(const char *path, mode_t mode, const void *data, size_t len);
/* Write a file in place of an earlier one, which readers have until this one is complete. 0 or
 * -errno. */
int replace_file(const char *path, mode_t mode, const void *data, size_t len);
/* Append a regular file of at most `most` bytes to a buffer. 0, -EFBIG, -EINVAL or -errno. */
int read_file(const char *path, size_t most, struct buf *out);
/* Write a text into a file that exists, such as one of the kernel's. 0 or -errno. */
int write_existing(const char *path, const char *text);
/* Write all bytes to a file that is open; interrupted and short writes continue. 0 or -errno. */
int write_all(int fd, const void *data, size_t len);

#endif
