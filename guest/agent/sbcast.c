/*
 * sbcast in a guest.  Slurm's own reads and writes files of the hosts, which is
 * right for folders that guests share with them.  Folders of the guest's own,
 * /tmp above all, it would mistake for the hosts': there the file goes through
 * the standard input of a step that writes it in every guest of the job.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "agent.h"

enum { GUESTS_MAX = 64 };         /* on a node */
enum { FUSE_MAGIC = 0x65735546 }; /* of virtiofs; FUSE_SUPER_MAGIC of newer headers */

/* Arguments: destination, "f" to overwrite, mode, time of change or nothing. */
static char script[] = "if [ -z \"$2\" ] && [ -e \"$1\" ]; then\n"
                       "    echo \"sbcast: error: $1: File exists\" >&2; exit 1\n"
                       "fi\n"
                       "cat > \"$1\" && chmod \"$3\" \"$1\" &&\n"
                       "if [ -n \"$4\" ]; then touch -d \"@$4\" \"$1\"; fi\n";

struct request {
    bool force, preserve;
    bool chooses; /* other nodes, or more files, than the job and the one file */
    const char *source;
    char target[PATH_MAX];
};

extern char **environ;

static bool is_shared(const char *path)
{
    struct statfs fs;
    return statfs(path, &fs) == 0 && fs.f_type == FUSE_MAGIC;
}

/* The absolute name of the file to make: "NAME" here, "FOLDER/" under the name it has now. */
static bool complete_target(struct request *r, const char *name)
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

/* False when Slurm's own shall say what is wrong, or its help. */
static bool parse(int argc, char **argv, struct request *r)
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
        {"nodelist", optional_argument, NULL, 'j'},
        {"exclude", required_argument, NULL, 'j'},
        {"send-libs", optional_argument, NULL, 'j'},
        {NULL, 0, NULL, 0},
    };
    opterr = 0;
    for (int o; (o = getopt_long(argc, argv, "+C::fF:j:ps:t:v", options, NULL)) >= 0;) {
        if (o == '?')
            return false;
        r->force = r->force || o == 'f';
        r->preserve = r->preserve || o == 'p';
        r->chooses = r->chooses || o == 'j';
    }
    if (argc - optind != 2)
        return false;
    r->source = argv[optind];
    return complete_target(r, argv[optind + 1]);
}

static bool target_is_shared(const struct request *r)
{
    char folder[PATH_MAX];
    (void)snprintf(folder, sizeof folder, "%s", r->target);
    *strrchr(folder, '/') = '\0';
    return is_shared(folder[0] != '\0' ? folder : "/");
}

_Noreturn static void fail(const char *what, const char *why)
{
    (void)fprintf(stderr, "sbcast: error: %s: %s\n", what, why);
    exit(1);
}

/* What the caller's step was told says nothing about the one that is to come. */
static void forget_step(void)
{
    for (char **e = environ; *e != NULL;) {
        char name[256];
        size_t len = strcspn(*e, "=");
        bool kept = strncmp(*e, "SLURM_", 6) != 0 || strncmp(*e, "SLURM_CONF=", 11) == 0 ||
                    strncmp(*e, "SLURM_JOB_ID=", 13) == 0 || len >= sizeof name;
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

/* As standard input, for srun to give to all of its tasks. */
static void open_source(const struct request *r, struct stat *st)
{
    int fd = open(r->source, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, st) < 0)
        fail(r->source, strerror(errno));
    if (!S_ISREG(st->st_mode))
        fail(r->source, "not a regular file");
    if (fd != STDIN_FILENO && dup2(fd, STDIN_FILENO) < 0)
        fail(r->source, strerror(errno));
}

/* Where nodes have several guests of the job, their number is in the environment. */
static unsigned long guests_of_node(void)
{
    const char *text = getenv("VHPC_JOB_GUESTS");
    unsigned long number = text != NULL ? strtoul(text, NULL, 10) : 1;
    return number > 0 && number <= GUESTS_MAX ? number : 1;
}

char **sbcast_as_srun(int argc, char **argv)
{
    static char nodes[64], tasks[64], each[64], mode[16], changed[32];
    static char *result[32];
    static struct request r;
    struct stat st;
    const char *count = getenv("SLURM_JOB_NUM_NODES");
    if (getenv("SLURM_JOB_ID") == NULL || count == NULL || !parse(argc, argv, &r) ||
        (target_is_shared(&r) && is_shared(r.source)))
        return NULL;
    if (r.chooses)
        fail(r.target, "a folder of the guests' own takes none of --jobid, --nodelist, --exclude, "
                       "--send-libs");
    open_source(&r, &st);
    (void)snprintf(nodes, sizeof nodes, "--nodes=%s", count);
    /* a task for each guest: on a node they go to its guests in blocks of equal size */
    unsigned long guests = guests_of_node();
    (void)snprintf(each, sizeof each, "--ntasks-per-node=%lu", guests);
    (void)snprintf(tasks, sizeof tasks, "--ntasks=%lu", strtoul(count, NULL, 10) * guests);
    (void)snprintf(mode, sizeof mode, "%o", (unsigned)st.st_mode & 0777U);
    (void)snprintf(changed, sizeof changed, "%lld", (long long)st.st_mtim.tv_sec);
    forget_step();
    char *command[] = {"srun",
                       "--quiet",
                       "--job-name=sbcast",
                       "--overlap",
                       "--mem=0",
                       "--cpu-bind=none",
                       each,
                       "--chdir=/",
                       nodes,
                       tasks,
                       "sh",
                       "-c",
                       script,
                       "sbcast",
                       r.target,
                       r.force ? "f" : "",
                       mode,
                       r.preserve ? changed : "",
                       NULL};
    memcpy(result, command, sizeof command);
    return result;
}
