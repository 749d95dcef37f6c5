/* SPDX-License-Identifier: Apache-2.0 */
/* The command line: all options are checked before anything is done. */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "confine.h"

static const char usage[] =
    "usage: vhpc-confine --uid UID --gid GID [OPTION]... -- COMMAND [ARGUMENT]...\n"
    "\n"
    "Runs a command with a user's ids, protected from that user's other processes:\n"
    "in a user namespace that root owns, without capabilities, in its own cgroup.\n"
    "\n"
    "  --uid UID, --gid GID     ids to run as; not root\n"
    "  --groups GID,GID,...     supplementary groups\n"
    "  --cgroup-fd N            open cgroup.procs of a cgroup to join; once for each hierarchy\n"
    "  --cpus LIST              CPUs that the command may use, such as 0-3,8\n"
    "  --limit NAME=N           nofile, fsize, core or nproc: soft and hard limit\n"
    "  --share DIR              give the command a root directory of its own, in which DIR is "
    "/share\n"
    "  --read-only              make /share read-only\n"
    "  --refuse DIR             refuse a --share that leads into DIR; repeatable\n"
    "  --report-fd N            descriptor for a line on each event: opened PATH (the real path\n"
    "                           of DIR), ready, absent TEXT, refused PATH, failed TEXT\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 3 if the user cannot enter DIR, 4 if DIR may not be shared, 2 on bad\n"
    "usage, 1 on any other failure; otherwise that of the command.\n";

#define LARGEST_ID (UINT32_MAX - 1) /* -1 means "no change" to setresuid(2) */

static int wrong(const char *option, const char *value, const char *expected)
{
    (void)fprintf(stderr, "vhpc-confine: --%s=%.80s: %s is expected\n", option, value, expected);
    return CONFINE_USAGE;
}

/* A decimal number that ends at one of the characters in `ends` (or the end of the text). */
static const char *number(const char *text, const char *ends, uint64_t max, uint64_t *value)
{
    char *rest;

    if (*text < '0' || *text > '9')
        return NULL;
    errno = 0;
    *value = strtoull(text, &rest, 10);
    if (errno != 0 || *value > max || (*rest != '\0' && strchr(ends, *rest) == NULL))
        return NULL;
    return rest;
}

static bool whole_number(const char *text, uint64_t max, uint64_t *value)
{
    return number(text, "", max, value) != NULL;
}

static int parse_groups(struct confine *c, const char *text)
{
    uint64_t gid;

    for (const char *at = text; *at != '\0';) {
        at = number(at, ",", LARGEST_ID, &gid);
        if (at == NULL || c->group_count == CONFINE_GROUPS_MAX)
            return wrong("groups", text, "a list of group ids");
        c->groups[c->group_count++] = (gid_t)gid;
        if (*at == ',')
            at++;
    }
    return 0;
}

static int parse_cpus(struct confine *c, const char *text)
{
    enum { CPUS_MAX = 65536 };
    uint64_t first, last;

    c->cpus = CPU_ALLOC(CPUS_MAX);
    c->cpus_size = CPU_ALLOC_SIZE(CPUS_MAX);
    if (c->cpus == NULL)
        return wrong("cpus", text, "enough memory");
    CPU_ZERO_S(c->cpus_size, c->cpus);
    for (const char *at = text; at != NULL;) {
        at = number(at, ",-", CPUS_MAX - 1, &first);
        if (at == NULL)
            return wrong("cpus", text, "a list of CPUs");
        last = first;
        if (*at == '-')
            at = number(at + 1, ",", CPUS_MAX - 1, &last);
        if (at == NULL || last < first)
            return wrong("cpus", text, "a list of CPUs");
        for (; first <= last; first++)
            CPU_SET_S((size_t)first, c->cpus_size, c->cpus);
        at = *at == ',' ? at + 1 : NULL;
    }
    return 0;
}

static int parse_limit(struct confine *c, const char *text)
{
    static const struct {
        const char *name;
        int resource;
    } known[] = {{"nofile", RLIMIT_NOFILE},
                 {"fsize", RLIMIT_FSIZE},
                 {"core", RLIMIT_CORE},
                 {"nproc", RLIMIT_NPROC}};
    const char *equals = strchr(text, '=');
    uint64_t value;

    if (equals == NULL || !whole_number(equals + 1, INT64_MAX, &value) ||
        c->limit_count == CONFINE_LIMITS_MAX)
        return wrong("limit", text, "NAME=N");
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strlen(known[i].name) == (size_t)(equals - text) &&
            strncmp(known[i].name, text, (size_t)(equals - text)) == 0) {
            c->limits[c->limit_count++] = (struct confine_limit){known[i].resource, value};
            return 0;
        }
    }
    return wrong("limit", text, "nofile, fsize, core or nproc");
}

static int parse_refused(struct confine *c, const char *path)
{
    if (path[0] != '/' || c->refused_count == CONFINE_REFUSED_MAX)
        return wrong("refuse", path, "an absolute path");
    c->refused[c->refused_count++] = path;
    return 0;
}

static int parse_one(struct confine *c, int option, const char *value)
{
    uint64_t parsed = 0;

    switch (option) {
    case 'u':
    case 'g':
        if (!whole_number(value, LARGEST_ID, &parsed) || parsed == 0)
            return wrong(option == 'u' ? "uid" : "gid", value, "a number above 0");
        if (option == 'u')
            c->uid = (uid_t)parsed;
        else
            c->gid = (gid_t)parsed;
        return 0;
    case 'G':
        return parse_groups(c, value);
    case 'C':
        if (!whole_number(value, INT_MAX, &parsed) || c->cgroup_count == CONFINE_CGROUPS_MAX)
            return wrong("cgroup-fd", value, "an open descriptor");
        c->cgroups[c->cgroup_count++] = (int)parsed;
        return 0;
    case 'p':
        return parse_cpus(c, value);
    case 'l':
        return parse_limit(c, value);
    case 's':
        if (value[0] != '/')
            return wrong("share", value, "an absolute path");
        c->share = value;
        return 0;
    case 'o':
        c->read_only = true;
        return 0;
    case 'r':
        return parse_refused(c, value);
    case 'R':
        if (!whole_number(value, INT_MAX, &parsed))
            return wrong("report-fd", value, "an open descriptor");
        c->report = (int)parsed;
        return 0;
    default:
        (void)fputs(usage, stderr);
        return CONFINE_USAGE;
    }
}

int confine_parse(struct confine *c, int argc, char **argv, bool *done)
{
    static const struct option options[] = {
        {"uid", required_argument, NULL, 'u'},
        {"gid", required_argument, NULL, 'g'},
        {"groups", required_argument, NULL, 'G'},
        {"cgroup-fd", required_argument, NULL, 'C'},
        {"cpus", required_argument, NULL, 'p'},
        {"limit", required_argument, NULL, 'l'},
        {"share", required_argument, NULL, 's'},
        {"read-only", no_argument, NULL, 'o'},
        {"refuse", required_argument, NULL, 'r'},
        {"report-fd", required_argument, NULL, 'R'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };

    *c = (struct confine){.report = -1};
    *done = false;
    for (int option; (option = getopt_long(argc, argv, "+", options, NULL)) >= 0;) {
        if (option == 'h' || option == 'V') {
            *done = true;
            return (option == 'h' ? fputs(usage, stdout) : puts("vhpc-confine " VHPC_VERSION)) < 0;
        }
        int code = parse_one(c, option, optarg);
        if (code != 0)
            return code;
    }
    c->command = argv + optind;
    if (c->uid == 0 || c->gid == 0 || c->command[0] == NULL || c->command[0][0] != '/' ||
        (c->share == NULL && (c->read_only || c->refused_count > 0))) {
        (void)fputs(usage, stderr);
        return CONFINE_USAGE;
    }
    return 0;
}

int confine_report(const struct confine *c, int code, const char *keyword, const char *format, ...)
{
    char line[PATH_MAX + 256];
    va_list arguments;
    int length = snprintf(line, sizeof line - 1, "%s ", keyword);

    va_start(arguments, format);
    int more = vsnprintf(line + length, sizeof line - 1 - (size_t)length, format, arguments);
    va_end(arguments);
    size_t total = more < 0 ? (size_t)length : (size_t)length + (size_t)more;
    if (total > sizeof line - 2)
        total = sizeof line - 2;
    for (size_t i = 0; i < total; i++) /* a name may contain a line break */
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
            line[i] = '?';
    line[total++] = '\n';
    if (c->report >= 0) {
        if (write(c->report, line, total) < 0)
            (void)fprintf(stderr, "vhpc-confine: report: %s\n", strerror(errno));
    } else if (code != 0) {
        (void)fprintf(stderr, "vhpc-confine: %.*s", (int)total, line);
    }
    return code;
}
