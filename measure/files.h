/* SPDX-License-Identifier: Apache-2.0 */
/* Throughput and metadata operations of a file system. */
#ifndef VHPC_MEASURE_FILES_H
#define VHPC_MEASURE_FILES_H

/* Write and read one file of MIB, and create, stat, read and remove COUNT files of 4 KiB, in a new
 * folder below FOLDER, which is removed again; print the results, return an exit status. */
int files(const char *folder, long mib, long count);

#endif
