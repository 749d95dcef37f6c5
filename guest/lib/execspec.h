/* SPDX-License-Identifier: Apache-2.0 */
/* The contents of an EXEC message: a program and everything that slurmstepd would set up for it. */
#ifndef VHPC_EXECSPEC_H
#define VHPC_EXECSPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <termios.h>

#include "buf.h"
#include "protocol.h"
#include "xauth.h"

enum {
    EXEC_RLIMITS_MAX = 32,
    EXEC_GROUPS_MAX = 65536,
    EXEC_CPUS_MAX = 1024,
    TERMIOS_LEN = 4 * 4 + NCCS, /* bytes of TAG_TERMIOS */
};

struct exec_rlimit {
    uint32_t resource;
    uint64_t soft; /* ~0 = unlimited */
    uint64_t hard;
};

struct execspec {
    uint8_t fd_dir[VHPC_FDS_MAX]; /* VHPC_FD_* or 0 */
    bool joined;                  /* fd 2 is the same open file as fd 1 */
    uint32_t uid;
    uint32_t gid;
    uint32_t *groups;
    size_t group_count;
    char **argv; /* NULL-terminated */
    size_t argc;
    char **envp; /* NULL-terminated */
    size_t envc;
    char *cwd; /* NULL = do not change */
    bool has_umask;
    uint32_t umask;
    struct exec_rlimit rlimit[EXEC_RLIMITS_MAX];
    size_t rlimit_count;
    uint8_t affinity[EXEC_CPUS_MAX / 8]; /* bit N of byte N/8: CPU N of the guest */
    size_t affinity_len;                 /* 0: all CPUs */
    bool has_nice;
    int32_t nice;
    bool tty;
    bool tty_out; /* fd 1 alone is a terminal (srun --unbuffered) */
    struct winsize winsize;
    bool has_termios;
    struct termios termios;
    char *script_path; /* NULL = argv[0] is not a script that is carried */
    uint8_t *script;
    size_t script_len;
    uint32_t
        operand; /* of a host call: index of the argument that the executor replaces; 0 = none */
    char *pmi_refusal; /* message for a program that uses PMI; NULL = PMI is not checked */
    bool pmi_network;  /* ... but a guest that has a network with the others ignores it */
    bool pmix;         /* ... and so does an agent that relays PMIx */
    struct x11_display x11;
    char *attach; /* the detached program to take over: "batch"; NULL = start one */
    char *step;   /* Slurm's step that the program belongs to; NULL = not known */
};

/* Append a copy of text to argv or envp; 0 or -ENOMEM. */
int execspec_add_arg(struct execspec *s, const char *text);
int execspec_add_env(struct execspec *s, const char *text);
/* Put a copy of text before the argument with this index; 0 or -ENOMEM. */
int execspec_insert_arg(struct execspec *s, size_t at, const char *text);
/* Value of a variable in envp, or NULL. */
const char *execspec_getenv(const struct execspec *s, const char *name);
/* Remove variables that begin with prefix. */
void execspec_drop_env(struct execspec *s, const char *prefix);

/* 0 or -ENOMEM, -EMSGSIZE if it is longer than a message may be. */
int execspec_encode(const struct execspec *s, struct buf *out);
/* Strict: 0, -EPROTO, -ENOMEM. On error *s is empty. */
int execspec_decode(const uint8_t *data, size_t len, struct execspec *s);
void execspec_free(struct execspec *s);

/* WINSIZE payload: rows, columns, x and y pixels as u16. */
void winsize_pack(uint8_t out[8], const struct winsize *w);
void winsize_unpack(const uint8_t in[8], struct winsize *w);

#endif
