/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-sbcast runs instead of Slurm's sbcast on hosts (in salloc's shell, in a script with
 * --vhpc-batch=host, with sbcast --jobid), by a link of that name earlier in PATH.  For a job with
 * guests it starts a task in one of them to find out whether the folder is shared with the hosts.
 * If it is not, the file goes to the guests.  In all other cases it runs Slurm's own sbcast.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sbcast.h"

static const char carrier[] = "_SLURM_SPANK_OPTION_vhpc_vhpc_image"; /* in salloc's shell */

/* Begins the probe's line: a site's TaskProlog may print others before it. */
#define MARK "vhpc-sbcast: "
enum { OUTPUT_MAX = 65536 };

/* Argument: the file. */
static char probe[] = "if [ -z \"$VHPC_JOB_IMAGE\" ]; then echo " MARK "host\n"
                      "elif [ \"$(stat -f -c %t \"${1%/*}/\" 2>/dev/null)\" = 65735546 ]; then\n"
                      "    echo " MARK "shared\n"
                      "else echo " MARK "own \"${VHPC_JOB_GUESTS:-1}\"; fi\n";

/* The next sbcast of PATH that is not this very file. */
_Noreturn static void run_slurms_own(char **argv)
{
    struct stat self, st;
    char name[PATH_MAX];
    const char *path = getenv("PATH");
    if (stat("/proc/self/exe", &self) < 0)
        sbcast_fail("/proc/self/exe", strerror(errno));
    if (path == NULL || path[0] == '\0')
        path = "/usr/local/bin:/usr/bin:/bin";
    for (const char *p = path; *p != '\0'; p += strspn(p, ":")) {
        size_t len = strcspn(p, ":");
        int n = snprintf(name, sizeof name, "%.*s/sbcast", (int)len, p);
        p += len;
        if (n > 0 && (size_t)n < sizeof name && stat(name, &st) == 0 &&
            (st.st_dev != self.st_dev || st.st_ino != self.st_ino))
            (void)execv(name, argv);
    }
    sbcast_fail("Slurm's own sbcast", "not found in PATH");
}

/* Whether the environment says that this job, which started this command, has guests. */
static bool is_marked(const char *job)
{
    const char *generation = getenv("VHPC_JOB_GENERATION");
    size_t len = strlen(job);
    return getenv(carrier) != NULL ||
           (generation != NULL && strncmp(generation, job, len) == 0 && generation[len] == '.');
}

/* Without variables of the caller's own step, and without defaults of options. */
_Noreturn static void run(char **argv)
{
    sbcast_forget("SLURM_");
    sbcast_forget("VHPC_");
    (void)execvp(argv[0], argv);
    sbcast_fail(argv[0], strerror(errno));
}

/* Reads the beginning of a command's output; false if the command fails. */
static bool ask(char **argv, char *answer, size_t size)
{
    int ends[2], status = -1;
    size_t len = 0;
    if (pipe2(ends, O_CLOEXEC) < 0)
        return false;
    pid_t pid = fork();
    if (pid == 0 && dup2(ends[1], STDOUT_FILENO) >= 0)
        run(argv);
    if (pid == 0)
        _exit(1);
    (void)close(ends[1]);
    for (ssize_t n; len < size - 1 && (n = read(ends[0], answer + len, size - 1 - len)) != 0;) {
        if (n < 0 && errno != EINTR)
            break;
        len += n > 0 ? (size_t)n : 0;
    }
    answer[len] = '\0';
    (void)close(ends[0]);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return pid > 0 && status == 0;
}

/*
 * Guests on each node if the folder is local to them; 0 if it is shared with the hosts, or the job
 * has no guests.
 */
static unsigned long count_guests(const struct sbcast *r)
{
    static char output[OUTPUT_MAX];
    char job[64], *rest;
    (void)snprintf(job, sizeof job, "--jobid=%.20s", r->job);
    char *argv[] = {"srun",
                    "--quiet",
                    "--job-name=sbcast",
                    "--overlap",
                    "--mem=0",
                    "--mpi=none",
                    "--cpu-bind=none",
                    "--chdir=/",
                    "--nodes=1",
                    "--ntasks=1",
                    "--input=none",
                    job,
                    "sh",
                    "-c",
                    probe,
                    "sbcast",
                    (char *)r->target,
                    NULL};
    if (!ask(argv, output, sizeof output))
        sbcast_fail(r->target, "cannot find out whether the job's guests share this folder: srun "
                               "could not start a task in the job");
    const char *marked = strstr(output, MARK),
               *answer = marked != NULL ? marked + strlen(MARK) : "";
    if (strncmp(answer, "host\n", 5) == 0 || strncmp(answer, "shared\n", 7) == 0)
        return 0;
    unsigned long guests = strncmp(answer, "own ", 4) == 0 ? strtoul(answer + 4, &rest, 10) : 0;
    if (guests == 0 || guests > SBCAST_GUESTS_MAX || *rest != '\n')
        sbcast_fail(r->target, "cannot find out whether the job's guests share this folder: the "
                               "task that srun started gave an unexpected answer");
    return guests;
}

static unsigned long count_nodes(const struct sbcast *r)
{
    char answer[128];
    char *argv[] = {"squeue", "--noheader", "--jobs", (char *)r->job, "--format=%D", NULL};
    unsigned long nodes = ask(argv, answer, sizeof answer) ? strtoul(answer, NULL, 10) : 0;
    if (nodes == 0)
        sbcast_fail(r->target, "squeue does not say how many nodes the job has");
    return nodes;
}

int main(int argc, char **argv)
{
    static struct sbcast r;
    static char job[32];
    struct stat st;
    const char *own = getenv("SLURM_JOB_ID"), *known = getenv("VHPC_SBCAST");
    if ((known != NULL && strcmp(known, "host") == 0) || !sbcast_parse(argc, argv, &r) ||
        (r.job == NULL && own == NULL))
        run_slurms_own(argv);
    const char *asked = r.job != NULL ? r.job : own;
    size_t digits = strspn(asked, "0123456789");
    (void)snprintf(job, sizeof job, "%.*s", (int)(digits < 20 ? digits : 20), asked);
    if (digits == 0 || (own != NULL && strcmp(job, own) == 0 && !is_marked(job)))
        run_slurms_own(argv);
    /* of a step, or of a component of a heterogeneous job */
    r.chooses = r.chooses || asked[digits] != '\0';
    r.job = job;
    unsigned long guests = count_guests(&r);
    if (guests == 0)
        run_slurms_own(argv);
    if (r.chooses)
        sbcast_fail(r.target,
                    "this folder is local to the guests: --nodelist, --exclude, --send-libs, and "
                    "--jobid with a step or a component cannot be used");
    unsigned long nodes = count_nodes(&r);
    sbcast_open_source(&r, &st);
    run(sbcast_step(&r, &st, nodes, guests));
}
