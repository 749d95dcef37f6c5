/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-locks: one per guest, with the rights of the job's user; its socket is inherited. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "file.h"
#include "sandbox.h"
#include "serve.h"
#include "version.h"

enum { MALFORMED = 3 };

static const char usage[] =
    "usage: vhpc-locks --listen-fd N [--share TAG:MODE:PATH]...\n"
    "                  [--share-read-only TAG:MODE:PATH]...\n"
    "\n"
    "Takes locks on files of shared folders for the programs of one guest, whose QEMU connects\n"
    "the guest's port " LOCKS_PORT_NAME " to the socket.\n"
    "\n"
    "  --listen-fd N  listening unix socket; one connection is served\n"
    "  --share TAG:MODE:PATH  a folder that the guest mounts by this tag; MODE: cluster (locks\n"
    "                 exclude programs on all hosts) or refuse (no program gets a lock)\n"
    "  --share-read-only TAG:MODE:PATH  a folder whose files the guest may only read\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 when the guest has ended; 3 when it violates the protocol; 2 on bad usage;\n"
    "1: cannot start.\n";

static int serve(struct locks_server *s, int fd)
{
    static uint8_t in[LOCKS_REQUEST + LOCKS_TEXT_MAX], out[LOCKS_REPLY + LOCKS_TEXT_MAX];
    struct locks_request request;
    struct locks_reply reply;
    for (size_t have = 0;;) {
        int used = locks_unpack_request(in, have, &request);
        if (used < 0) {
            (void)fprintf(stderr, "vhpc-locks: the guest has sent a malformed message\n");
            return MALFORMED;
        }
        if (used > 0) {
            locks_server_answer(s, &request, &reply);
            if (write_all(fd, out, locks_pack_reply(out, &reply)) < 0)
                return 0;
            have -= (size_t)used;
            memmove(in, in + used, have);
            continue;
        }
        ssize_t n = read(fd, in + have, sizeof in - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return 0;
        have += (size_t)n;
    }
}

static int add_share(struct locks_server *s, char *spec, bool read_only)
{
    int rc = locks_server_add(s, spec, read_only);
    if (rc == -EINVAL)
        (void)fputs(usage, stderr);
    else if (rc < 0)
        (void)fprintf(stderr, "vhpc-locks: cannot open the folder of share %s: %s\n", spec,
                      strerror(-rc));
    return rc == -EINVAL ? 2 : rc < 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"listen-fd", required_argument, NULL, 'l'},
        {"share", required_argument, NULL, 's'},
        {"share-read-only", required_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    static struct locks_server server;
    char *end = NULL;
    long listener = -1;
    for (int o, status; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;) {
        switch (o) {
        case 'h':
            return fputs(usage, stdout) < 0;
        case 'V':
            return puts("vhpc-locks " VHPC_VERSION) < 0;
        case 'l':
            listener = strtol(optarg, &end, 10);
            break;
        case 's':
        case 'r':
            status = add_share(&server, optarg, o == 'r');
            if (status != 0)
                return status;
            break;
        default:
            (void)fputs(usage, stderr);
            return 2;
        }
    }
    if (optind != argc || end == NULL || *end != '\0' || listener < 0 || listener > 1 << 20) {
        (void)fputs(usage, stderr);
        return 2;
    }
    /* No core files, and no privileges from a setuid binary. */
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    (void)signal(SIGPIPE, SIG_IGN);
    int rc = sandbox_enter(&server);
    if (rc < 0 && rc != -ENOSYS && rc != -EOPNOTSUPP) {
        (void)fprintf(stderr, "vhpc-locks: cannot give up other files: %s\n", strerror(-rc));
        return 1;
    }
    int fd = accept4((int)listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        (void)fprintf(stderr, "vhpc-locks: cannot accept QEMU's connection: %s\n", strerror(errno));
        return 1;
    }
    (void)close((int)listener);
    return serve(&server, fd);
}
