/* SPDX-License-Identifier: Apache-2.0 */
#include "sbcast.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Arguments: destination, "f" to overwrite, mode, modification time or nothing. */
static char script[] = "if [ -z \"$2\" ] && [ -e \"$1\" ]; then\n"
                       "    echo \"sbcast: error: $1: File exists\" >&2; exit 1\n"
                       "fi\n"
                       "cat > \"$1\" && chmod \"$3\" \"$1\" &&\n"
                       "if [ -n \"$4\" ]; then touch -d \"@$4\" \"$1\"; fi\n";

extern char **environ;

/*
 * The absolute name of the destination: "NAME" is relative to this directory, "FOLDER/" keeps the
 * name of the source.
 */
static bool complete_target(struct sbcast *r, const char *name)
{
    char cwd[PATH_MAX] = "";
    const char *base = "", *slash = strrchr(r->source, '/');
    if (name[0] != '/' && getcwd(cwd, sizeof cwd) == NULL)
        return false;
    if (name[0] != '\0' && name[strlen(name) - 1] == '/')
        base = slash != NULL ? slash + 1 : r->source;
    int n = snprintf(r->target, sizeof r->target, "%s%s%s%s", cwd, name[0] != '/' ? "/" : "", name,
                     base);
    return n > 0 && (size_t)n < sizeof r->target;
}

bool sbcast_parse(int argc, char **argv, struct sbcast *r)
{
    static const struct option options[] = {
        {"compress", optional_argument, NULL, 'C'},
        {"fanout", required_argument, NULL, 'F'},
        {"treewidth", required_argument, NULL, 'F'},
        {"force", no_argument, NULL, 'f'},
        {"preserve", no_argument, NULL, 'p'},
        {"size", required_argument, NULL, 's'},
        {"timeout", required_argument, NULL, 't'},
        {"verbose", no_argument, NULL, 'v'},
        {"jobid", required_argument, NULL, 'j'},
        {"nodelist", optional_argument, NULL, 'c'},
        {"exclude", required_argument, NULL, 'c'},
        {"send-libs", optional_argument, NULL, 'c'},
        {NULL, 0, NULL, 0},
    };
    opterr = 0;
    for (int o; (o = getopt_long(argc, argv, "+C::fF:j:ps:t:v", options, NULL)) >= 0;) {
        if (o == '?')
            return false;
        r->force = r->force || o == 'f';
        r->preserve = r->preserve || o == 'p';
        r->chooses = r->chooses || o == 'c';
        if (o == 'j')
            r->job = optarg;
    }
    if (argc - optind != 2)
        return false;
    r->source = argv[optind];
    return complete_target(r, argv[optind + 1]);
}

_Noreturn void sbcast_fail(const char *what, const char *why)
{
    (void)fprintf(stderr, "sbcast: error: %s: %s\n", what, why);
    exit(1);
}

void sbcast_forget(const char *prefix)
{
    for (char **e = environ; *e != NULL;) {
        char name[256];
        size_t len = strcspn(*e, "=");
        bool kept = strncmp(*e, prefix, strlen(prefix)) != 0 ||
                    strncmp(*e, "SLURM_CONF=", 11) == 0 || strncmp(*e, "SLURM_JOB_ID=", 13) == 0 ||
                    len >= sizeof name;
        if (kept) {
            e++;
            continue;
        }
        memcpy(name, *e, len);
        name[len] = '\0';
        (void)unsetenv(name);
        e = environ;
    }
}

void sbcast_open_source(const struct sbcast *r, struct stat *st)
{
    int fd = open(r->source, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, st) < 0)
        sbcast_fail(r->source, strerror(errno));
    if (!S_ISREG(st->st_mode))
        sbcast_fail(r->source, "not a regular file");
    if (fd != STDIN_FILENO && dup2(fd, STDIN_FILENO) < 0)
        sbcast_fail(r->source, strerror(errno));
}

char **sbcast_step(const struct sbcast *r, const struct stat *st, unsigned long nodes,
                   unsigned long guests)
{
    static char count[64], tasks[64], each[64], job[64], mode[16], changed[32];
    static char *result[32];
    (void)snprintf(count, sizeof count, "--nodes=%lu", nodes);
    /* one task for each guest: tasks fill a node's guests in blocks of equal size */
    (void)snprintf(each, sizeof each, "--ntasks-per-node=%lu", guests);
    (void)snprintf(tasks, sizeof tasks, "--ntasks=%lu", nodes * guests);
    (void)snprintf(job, sizeof job, "--jobid=%.20s", r->job != NULL ? r->job : "");
    (void)snprintf(mode, sizeof mode, "%o", (unsigned)st->st_mode & 0777U);
    (void)snprintf(changed, sizeof changed, "%lld", (long long)st->st_mtim.tv_sec);
    char *command[] = {"srun",
                       "--quiet",
                       "--job-name=sbcast",
                       "--overlap",
                       "--mem=0",
                       "--cpu-bind=none",
                       "--mpi=none",
                       "--chdir=/",
                       "--output=none", /* what a site's TaskProlog prints */
                       "--error=all",
                       r->job != NULL ? job : "--input=all",
                       each,
                       count,
                       tasks,
                       "sh",
                       "-c",
                       script,
                       "sbcast",
                       (char *)r->target,
                       r->force ? "f" : "",
                       mode,
                       r->preserve ? changed : "",
                       NULL};
    memcpy(result, command, sizeof command);
    return result;
}
