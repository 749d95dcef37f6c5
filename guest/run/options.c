/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"
#include "version.h"

enum { TIMEOUT_DEFAULT_S = 60, TIMEOUT_MAX_S = 86400 };

static const char usage[] =
    "usage: vhpc-run [--socket PATH] [--script] [--attach STEP] [--timeout S] [--]\n"
    "                PROGRAM [ARG...]\n"
    "\n"
    "Runs PROGRAM in the job's guest with this process's environment, working\n"
    "directory, identity, limits and stdio, and ends with its exit status or signal.\n"
    "\n"
    "  --socket PATH  socket of the guest's vhpc-shim (default: $VHPC_RUN_SOCKET)\n"
    "  --script       copy PROGRAM, which is a file of this host, into the guest\n"
    "                 (default: when $VHPC_RUN_SCRIPT is 1)\n"
    "  --attach STEP  start nothing: take over the program of this step (batch), which waits in a\n"
    "                 guest that was saved (default: $VHPC_RUN_ATTACH)\n"
    "  --timeout S    longest wait for the guest's agent (default: $VHPC_RUN_TIMEOUT or 60)\n"
    "  --help, --version\n"
    "\n"
    "$VHPC_RUN_ARGV0      if set, this is PROGRAM, all arguments are arguments of it,\n"
    "                     and options come from the environment only\n"
    "$VHPC_RUN_CPUS       CPU of this host for each CPU of the guest, separated by colons\n"
    "$VHPC_RUN_COMPONENTS  how many components of a heterogeneous job have one network for MPI\n"
    "$VHPC_RUN_COMMANDS   colon-separated commands that the guest may run on this host\n"
    "$VHPC_RUN_COMMAND_PATH  directories that are searched for them, after the standard ones\n"
    "$VHPC_RUN_SAVE       image that the guest becomes when PROGRAM has succeeded\n"
    "$VHPC_RUN_SAVE_COMMAND  path of the command vhpc, which makes it\n"
    "$VHPC_RUN_STATE      the job's state file on this node: why the node ended the guest\n"
    "\n"
    "$SLURM_NO_KILL       if set and not \"off\": the other tasks of a step go on if the guest\n"
    "                     ends; otherwise vhpc-run ends the step by scancel\n"
    "\n"
    "Exit status: that of the program; errno (2: not found) if it cannot be executed; 125 if\n"
    "the guest has ended or does not answer; 126 if the guest refuses; 64 on bad usage.\n";

enum { EXIT_USAGE = 64 };

static int complain(const char *what, const char *value)
{
    (void)fprintf(stderr, "vhpc-run: %s%s\n", what, value);
    (void)fputs(usage, stderr);
    return EXIT_USAGE;
}

static bool parse_timeout(const char *text, int *out)
{
    char *rest;
    errno = 0;
    long value = strtol(text, &rest, 10);
    if (errno != 0 || rest == text || *rest != '\0' || value < 1 || value > TIMEOUT_MAX_S)
        return false;
    *out = (int)value;
    return true;
}

/* Not getopt, because everything after PROGRAM belongs to PROGRAM. Returns the index of PROGRAM. */
static int parse_line(int argc, char **argv, struct run_options *o, int *status)
{
    int i = 1;
    *status = -1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *a = argv[i];
        if (strcmp(a, "--") == 0)
            return i + 1;
        if (strcmp(a, "--script") == 0) {
            o->script = true;
        } else if (strcmp(a, "--attach") == 0 && i + 1 < argc) {
            o->attach = argv[++i];
        } else if (strcmp(a, "--socket") == 0 && i + 1 < argc) {
            o->socket = argv[++i];
        } else if (strcmp(a, "--timeout") == 0 && i + 1 < argc) {
            if (!parse_timeout(argv[++i], &o->timeout_s))
                *status = complain("not a number of seconds: ", argv[i]);
        } else if (strcmp(a, "--help") == 0) {
            *status = fputs(usage, stdout) < 0;
            return i;
        } else if (strcmp(a, "--version") == 0) {
            *status = puts("vhpc-run " VHPC_VERSION) < 0;
            return i;
        } else {
            *status = complain("unknown or incomplete option: ", a);
        }
        if (*status >= 0)
            return i;
    }
    return i;
}

int run_parse(int argc, char **argv, struct run_options *o)
{
    const char *script = getenv("VHPC_RUN_SCRIPT");
    const char *timeout = getenv("VHPC_RUN_TIMEOUT");
    char *argv0 = getenv("VHPC_RUN_ARGV0");
    *o = (struct run_options){.socket = getenv("VHPC_RUN_SOCKET"),
                              .script = script != NULL && strcmp(script, "1") == 0,
                              .attach = getenv("VHPC_RUN_ATTACH"),
                              .save = getenv("VHPC_RUN_SAVE"),
                              .save_command = getenv("VHPC_RUN_SAVE_COMMAND"),
                              .timeout_s = TIMEOUT_DEFAULT_S};
    if (timeout != NULL && !parse_timeout(timeout, &o->timeout_s))
        return complain("VHPC_RUN_TIMEOUT is not a number of seconds: ", timeout);
    if (argv0 != NULL) {
        /* The plugin has replaced argv[0] by our path; here it gets its own value again. */
        argv[0] = argv0;
        o->argv = argv;
        o->argc = argc;
    } else {
        int status, first = parse_line(argc, argv, o, &status);
        if (status >= 0)
            return status;
        o->argv = argv + first;
        o->argc = argc - first;
    }
    if (o->argc < 1)
        return complain("no program to run", "");
    if (o->socket == NULL || o->socket[0] == '\0')
        return complain("no socket: neither --socket nor VHPC_RUN_SOCKET is set", "");
    return -1;
}
