/* SPDX-License-Identifier: Apache-2.0 */
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PART_BYTES = RING_BYTES / RING_PARTS };

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static int map_parts(struct ring *r, const int fd[RING_PARTS], int access)
{
    size_t size = (size_t)2 * RING_BYTES;
    uint8_t *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return -errno;
    for (size_t i = 0; i < (size_t)2 * RING_PARTS; i++) {
        void *part = at + i * PART_BYTES;
        if (mmap(part, PART_BYTES, access, MAP_SHARED | MAP_FIXED, fd[i % RING_PARTS], 0) != part) {
            int rc = -errno;
            (void)munmap(at, size);
            return rc;
        }
    }
    *r = (struct ring){.at = at};
    return 0;
}

static int make_part(void)
{
    int fd = memfd_create("vhpc-output", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, PART_BYTES) == 0)
        return fd;
    int rc = -errno;
    if (fd >= 0)
        (void)close(fd);
    return rc;
}

/* The size stays, or an access would be a SIGBUS; and no other process writes. */
static int seal(int fd)
{
    const int size = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (fcntl(fd, F_ADD_SEALS, size | F_SEAL_FUTURE_WRITE) == 0 ||
        fcntl(fd, F_ADD_SEALS, size) == 0)
        return 0;
    return -errno;
}

static void close_all(const int *fd, size_t count)
{
    for (size_t i = 0; i < count; i++)
        (void)close(fd[i]);
}

int ring_make(struct ring *r, int fd[RING_PARTS])
{
    size_t made = 0;
    int rc = 0;
    while (made < RING_PARTS && rc >= 0) {
        rc = make_part();
        if (rc >= 0)
            fd[made++] = rc;
    }
    if (rc >= 0)
        rc = map_parts(r, fd, PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < RING_PARTS && rc >= 0; i++)
        rc = seal(fd[i]);
    if (rc >= 0)
        return 0;
    ring_free(r);
    close_all(fd, made);
    return rc;
}

int ring_map(struct ring *r, const int fd[RING_PARTS])
{
    for (int i = 0; i < RING_PARTS; i++) {
        struct stat st;
        int seals = fcntl(fd[i], F_GET_SEALS);
        if (seals < 0 || fstat(fd[i], &st) < 0)
            return -errno;
        if ((seals & F_SEAL_SHRINK) == 0 || st.st_size != PART_BYTES)
            return -EINVAL;
    }
    return map_parts(r, fd, PROT_READ);
}

void ring_free(struct ring *r)
{
    if (r->at != NULL)
        (void)munmap(r->at, (size_t)2 * RING_BYTES);
    *r = (struct ring){0};
}
