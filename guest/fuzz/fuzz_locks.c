/* SPDX-License-Identifier: Apache-2.0 */
/* promise: attack.locks */
/*
 * Arbitrary bytes of a guest to vhpc-locks, and the same bytes as answers and as the tables that a
 * broker reads: only files of the share are opened, and all of them are closed.
 */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mounts.h"
#include "rig.h"
#include "serve.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct locks_server server;
    char spec[] = "home0:cluster:/etc";
    struct locks_request request;
    struct locks_reply reply;
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
