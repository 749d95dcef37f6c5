/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A hash tree follows the root in its blob */
#include "verity.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/dm-ioctl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <unistd.h>

#include "fatal.h"

#define CONTROL "/dev/mapper/control"
#define NAME "vhpc-root"
#define SECTOR 512
#define TABLE_SIZE 512

/* A request with the one target of a table behind it, as DM_TABLE_LOAD reads it. */
struct request {
    struct dm_ioctl head;
    struct dm_target_spec target;
    char table[TABLE_SIZE];
};

bool verity_parse(struct verity *verity, const char *value)
{
    const char *colon = strchr(value, ':');
    uint64_t blocks = 0;

    if (colon == NULL || value[0] == '0')
        return false;
    for (const char *digit = value; digit < colon; digit++) {
        if (*digit < '0' || *digit > '9')
            return false;
        blocks = blocks * 10 + (uint64_t)(*digit - '0');
        if (blocks > VERITY_BLOCKS_MAX)
            return false;
    }
    if (blocks == 0 || strlen(colon + 1) != VERITY_HASH_LENGTH ||
        strspn(colon + 1, "0123456789abcdef") != VERITY_HASH_LENGTH)
        return false;
    verity->blocks = blocks;
    memcpy(verity->root_hash, colon + 1, sizeof verity->root_hash);
    return true;
}

bool verity_table(char *table, size_t size, const struct verity *verity, const char *device)
{
    /* The tree begins at the block after the data. */
    const int length =
        snprintf(table, size, "1 %s %s %d %d %" PRIu64 " %" PRIu64 " sha256 %s -", device, device,
                 VERITY_BLOCK, VERITY_BLOCK, verity->blocks, verity->blocks, verity->root_hash);

    return length >= 0 && (size_t)length < size;
}

static void prepare(struct request *request)
{
    *request = (struct request){
        .head = {.version = {DM_VERSION_MAJOR, 0, 0},
                 .data_size = sizeof *request,
                 .data_start = offsetof(struct request, target),
                 .name = NAME},
    };
}

/* The kernel's reasons for a refusal are on the console. */
static void ask(int control, unsigned long number, const char *what, struct request *request)
{
    if (ioctl(control, number, request) != 0)
        die(errno, "cannot %s dm-verity for the root", what);
}

/* The superblock of the file system is there; a wrong root hash must not look like a broken one. */
static void check_first_block(const char *device)
{
    char block[VERITY_BLOCK];
    const int fd = open(device, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, block, sizeof block);

    if (n != (ssize_t)sizeof block)
        die(n < 0 ? errno : EIO,
            "the root does not match its root hash (was the file on the node changed?)");
    close(fd);
}

void verity_open(const struct verity *verity, const char *backing, char device[VERITY_DEVICE_SIZE])
{
    struct request request;
    const int control = open(CONTROL, O_RDWR | O_CLOEXEC);

    if (control < 0)
        die(errno, "cannot open " CONTROL " (no dm-verity in the initrd?)");
    prepare(&request);
    ask(control, DM_DEV_CREATE, "create", &request);
    /* Not 0 by rule: a kernel parameter can have made other devices. */
    snprintf(device, VERITY_DEVICE_SIZE, "/dev/dm-%u", minor((dev_t)request.head.dev));

    prepare(&request);
    request.head.flags = DM_READONLY_FLAG;
    request.head.target_count = 1;
    request.target.length = verity->blocks * (VERITY_BLOCK / SECTOR);
    memcpy(request.target.target_type, "verity", sizeof "verity");
    if (!verity_table(request.table, sizeof request.table, verity, backing))
        die(ENAMETOOLONG, "cannot use block device %s", backing);
    ask(control, DM_TABLE_LOAD, "set up", &request);

    prepare(&request); /* without DM_SUSPEND_FLAG: the loaded table becomes the active one */
    ask(control, DM_DEV_SUSPEND, "start", &request);
    close(control);
    check_first_block(device);
}
