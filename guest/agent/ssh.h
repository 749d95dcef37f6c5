/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ssh operation: ssh between the guests of a job, with keys that only these guests have. The
 * agent listens on the guest's addresses on the network of the job and starts the image's sshd for
 * each connection, so an image without sshd has no open port.
 */
#ifndef VHPC_SSH_H
#define VHPC_SSH_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "agent.h"
#include "buf.h"
#include "loop.h"

#define SSH_FOLDER "/run/vhpc/ssh"
#define SSH_CLIENT_FOLDER "/etc/ssh"
#define SSH_DAEMON "/usr/sbin/sshd"
/* The name of all guests in files of host keys. */
#define SSH_HOST_ALIAS "vhpc-guest"

enum {
    SSH_KEY_MAX = 16384,   /* bytes of a private key */
    SSH_PUBLIC_MAX = 1024, /* bytes of a public key: one line */
    SSH_CONNECTIONS_MAX = 64,
    SSH_PORT = 22,
    /* ssh ends after INTERVAL_S * (COUNT + 1) without an answer. */
    SSH_ALIVE_INTERVAL_S = 1,
    SSH_ALIVE_COUNT = 5,
};

/* Fields of the request. Private keys are in the format of OpenSSH, public keys are one line. */
struct ssh_want {
    char *host_key;
    char *host_public;
    char *user_key;
    char *user_public;
    uint32_t uid;
    uint32_t gid;
};

/* Files of the guests of a cluster: texts that end with a line end, or are empty. */
struct ssh_cluster {
    const char *names; /* one line, of all guests */
    const char *known; /* lines of a known_hosts file */
    const char *keys;  /* public keys that may log in as uid */
    uint32_t uid;
};

struct ssh {
    const struct agent *agent;
    struct source listener[2];
    pid_t child[SSH_CONNECTIONS_MAX]; /* sshd processes; 0: none */
};

/* 0, or -EINVAL with one line in text. */
int ssh_check(const struct ssh_want *want, char *text, size_t size);
/*
 * Write the keys and the settings of sshd and ssh into folder, and a file into
 * client_folder/ssh_config.d that applies the latter to the hosts in names. 0, or -errno with one
 * line in text.
 */
int ssh_write(const struct ssh_want *want, const char *folder, const char *client_folder,
              const char *names, char *text, size_t size);
/* The operation: 0, or -errno with one line in text. It can be repeated. */
int ssh_apply(struct agent *a, const struct ssh_want *want, char *text, size_t size);
/* The same for the guests of a cluster, in files of their own. */
int ssh_write_cluster(const struct ssh_cluster *cluster, const char *folder,
                      const char *client_folder, char *text, size_t size);
int ssh_apply_cluster(const struct agent *a, const struct ssh_cluster *cluster, char *text,
                      size_t size);
/* A process has ended. */
void ssh_reaped(const struct agent *a, pid_t pid);
void ssh_close(struct agent *a);

#endif
