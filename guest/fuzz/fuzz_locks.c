/* SPDX-License-Identifier: Apache-2.0 */
/* promise: attack.locks */
/*
 * Arbitrary bytes of a guest to vhpc-locks, and the same bytes as answers and as the tables that a
 * broker reads: only files of the share are opened, and all of them are closed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "file.h"
#include "files.h"
#include "mounts.h"
#include "rig.h"
#include "serve.h"

/* The tables of mounts and of locks; the corpus has a lock on file 00:2d:77. */
static void read_tables(const uint8_t *data, size_t size)
{
    static struct locked_files files = {.node = {.fd = -1}};
    struct mounts mounts;
    char name[32], path[64];
    int fd = memfd_create("table", MFD_CLOEXEC);
    if (fd < 0 || write_all(fd, data, size) < 0)
        abort();
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (mounts_read(&mounts, name) < 0)
        abort();
    for (size_t i = 0; i < mounts.count; i++) {
        (void)mounts_tag(&mounts, mounts.entry[i].device);
        (void)mounts_locate(&mounts, mounts.entry[i].id, "/home/alice/f", path, sizeof path);
    }
    mounts_free(&mounts);
    if (files.used == 0 && files_add(&files, makedev(0, 0x2d), 77, "home0", "f") == NULL)
        abort();
    files_need_nothing(&files);
    if (files_need_locks(&files, name) < 0)
        abort();
    (void)close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct locks_server server;
    char spec[] = "home0:cluster:/etc";
    struct locks_request request;
    struct locks_reply reply;
    read_tables(data, size);
    if (locks_server_add(&server, spec, true) < 0)
        abort();
    for (int n; size > 0 && (n = locks_unpack_request(data, size, &request)) > 0;) {
        uint8_t out[LOCKS_REPLY + LOCKS_TEXT_MAX];
        locks_server_answer(&server, &request, &reply);
        size_t len = locks_pack_reply(out, &reply);
        struct stat st;
        if (len == 0 || locks_unpack_reply(out, len, &reply) != (int)len)
            abort();
        if (server.file[request.file % LOCKS_FILES].open &&
            (fstat(server.file[request.file % LOCKS_FILES].fd, &st) < 0 ||
             st.st_ino != request.inode))
            abort();
        data += n;
        size -= (size_t)n;
    }
    (void)locks_unpack_reply(data, size, &reply);
    locks_server_free(&server);
    return 0;
}
