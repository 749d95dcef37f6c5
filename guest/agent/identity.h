/* SPDX-License-Identifier: Apache-2.0 */
/* The identity of the job's user in this guest. */
#ifndef VHPC_IDENTITY_H
#define VHPC_IDENTITY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct identity_group {
    uint32_t gid;
    char *name;
};

struct identity {
    char *hostname;
    char *timezone; /* name of the host's time zone, "" if it is not known; NULL = the image's */
    uint8_t *zone;  /* the file of that zone; without it the host is in UTC */
    size_t zone_len;
    char *user; /* NULL = no user */
    char *gecos;
    char *home;
    char *shell;
    uint32_t uid;
    uint32_t gid;
    char **hosts; /* lines of /etc/hosts */
    size_t host_count;
    struct identity_group *groups;
    size_t group_count;
    char **commands; /* host commands by name */
    size_t command_count;
};

#endif
