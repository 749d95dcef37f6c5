/* SPDX-License-Identifier: Apache-2.0 */
#include "launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "slurm_args.h"

enum {
    /*
     * srun returns the highest code of its tasks: 125 is vhpc-run's when the guest is gone, above
     * are those of tasks that were killed. Daemons that end as mpirun has told them have less.
     */
    EXIT_LOST = 125,
    /* mpirun looks at its signals in no fixed order; until it has seen ours, we are here. */
    NOTICE_MS = 1000,
    PATH_SIZE = 64,
};

static void ignore_option(void *arg, const char *name, const char *value)
{
    (void)arg;
    (void)name;
    (void)value;
}

static bool is_daemon(const char *word)
{
    const char *slash = strrchr(word, '/'), *name = slash != NULL ? slash + 1 : word;
    return strcmp(name, "prted") == 0 || strcmp(name, "orted") == 0;
}

static bool is_operand(void *arg, const char *word)
{
    (void)arg;
    return is_daemon(word);
}

bool launcher_starts_daemons(int argc, char *const argv[])
{
    const struct slurm_reader reader = {.option = ignore_option, .operand = is_operand};
    int command = slurm_args_read(SLURM_SRUN, argc, argv, &reader);
    return command < argc && is_daemon(argv[command]);
}

void launcher_show_errors(void)
{
    struct stat now;
    char path[PATH_SIZE];
    if (fstat(STDERR_FILENO, &now) < 0 || !S_ISCHR(now.st_mode) || now.st_rdev != makedev(1, 3))
        return; /* not /dev/null */
    (void)snprintf(path, sizeof path, "/proc/%d/fd/2", (int)getppid());
    int fd = open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC); /* fails if it is a socket */
    if (fd < 0)
        return;
    (void)dup2(fd, STDERR_FILENO);
    (void)close(fd);
}

/* Not a script that stands for srun, or what became our parent when mpirun has ended. */
static bool is_launcher(pid_t pid)
{
    static const char *const names[] = {"mpirun", "mpiexec", "prte", "orte", "oshrun"};
    char path[PATH_SIZE], name[PATH_SIZE] = "";
    (void)snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool known = false;
    if (fgets(name, sizeof name, file) != NULL)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            known = known || strncmp(name, names[i], strlen(names[i])) == 0;
    (void)fclose(file);
    return known;
}

void launcher_end(const struct front_result *r)
{
    pid_t parent = getppid();
    if (r->end == FRONT_EXITED && r->value < EXIT_LOST)
        return;
    if (parent > 1 && is_launcher(parent) && kill(parent, SIGTERM) == 0)
        (void)poll(NULL, 0, NOTICE_MS);
}
