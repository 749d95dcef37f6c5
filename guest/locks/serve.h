/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers the requests of one guest: locks on files of the node, for the guest as their only owner.
 * Locks of fcntl are locks of the open file, so that they exclude all other programs, of this user
 * or another one, and end with this process at the latest.
 */
#ifndef VHPC_LOCKS_SERVE_H
#define VHPC_LOCKS_SERVE_H

#include <stdbool.h>
#include <stddef.h>

#include "wire.h"

enum { LOCKS_SHARES = 128 };

struct locks_share {
    const char *tag;
    const char *mode; /* "cluster": locks are taken; "refuse": the guest refuses them itself */
    bool read_only;
    int root; /* O_PATH */
};

struct locks_server {
    struct locks_share share[LOCKS_SHARES];
    size_t shares;
    struct locks_file {
        bool open;
        int fd;
        uint64_t inode;
        uint8_t flock; /* enum locks_mode */
    } file[LOCKS_FILES];
    char list[LOCKS_TEXT_MAX]; /* of HELLO */
};

/*
 * Add a share, "TAG:MODE:PATH", with the rights of this process; the text is changed. 0 or
 * -errno.
 */
int locks_server_add(struct locks_server *s, char *spec, bool read_only);
/* Carry out a request; the reply's text is that of the server. */
void locks_server_answer(struct locks_server *s, const struct locks_request *r,
                         struct locks_reply *reply);
/* Close all files, which ends their locks, and all shares. */
void locks_server_free(struct locks_server *s);

#endif
