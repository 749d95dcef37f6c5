/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dm-verity for the root: the kernel checks each block of the root against a hash tree when it is
 * read, and the tree against its root hash, which comes from the image's manifest.
 *
 * The tree follows the data on the same device (docs/image-format.md): SHA-256, blocks of 4096
 * bytes, no salt, no superblock.
 */
#ifndef VHPC_INIT_VERITY_H
#define VHPC_INIT_VERITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VERITY_BLOCK 4096
#define VERITY_HASH_LENGTH 64          /* hexadecimal digits of a SHA-256 */
#define VERITY_BLOCKS_MAX (1ULL << 32) /* 16 TiB, as a manifest allows */
#define VERITY_DEVICE_SIZE 32

struct verity {
    uint64_t blocks; /* of data; 0: without dm-verity */
    char root_hash[VERITY_HASH_LENGTH + 1];
};

/* Fills verity from BLOCKS:ROOTHASH, the value of vhpc.verity=. False if it has another form. */
bool verity_parse(struct verity *verity, const char *value);

/*
 * Writes the parameters of the target "verity" for a device with data and tree (kernel,
 * admin-guide/device-mapper/verity.rst). Without optional parameters: a changed block is EIO for
 * the program that reads it, each time it is read. False if they do not fit.
 */
bool verity_table(char *table, size_t size, const struct verity *verity, const char *device);

/*
 * Makes the device of the checked data and writes its path to device; or dies, also if the first
 * block is not that of the root hash. backing: the device with data and tree.
 */
void verity_open(const struct verity *verity, const char *backing, char device[VERITY_DEVICE_SIZE]);

#endif
