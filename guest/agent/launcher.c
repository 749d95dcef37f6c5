/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: An srun that ends mpirun */
#include "launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "launcher_process.h"
#include "slurm_args.h"

enum {
    /*
     * srun returns the highest code of its tasks: 125 is vhpc-run's when the guest is gone, above
     * are those of tasks that were killed. Daemons that end as mpirun has told them have less.
     */
    EXIT_LOST = 125,
    /* mpirun looks at its signals in no fixed order; until it has seen ours, we are here. */
    NOTICE_MS = 1000,
};

static enum launch_kind kind_of(const char *word)
{
    static const struct {
        const char *name;
        enum launch_kind kind;
    } daemons[] = {{"prted", LAUNCH_OPENMPI},
                   {"orted", LAUNCH_OPENMPI},
                   {"hydra_pmi_proxy", LAUNCH_HYDRA},
                   {"hydra_bstrap_proxy", LAUNCH_HYDRA}, /* of Intel MPI */
                   {"pmi_proxy", LAUNCH_HYDRA}};         /* of its earlier versions */
    const char *slash = strrchr(word, '/'), *name = slash != NULL ? slash + 1 : word;
    for (size_t i = 0; i < sizeof daemons / sizeof *daemons; i++)
        if (strcmp(name, daemons[i].name) == 0)
            return daemons[i].kind;
    return LAUNCH_OTHER;
}

static void see_option(void *arg, const char *name, const char *value)
{
    struct launch *launch = arg;
    if (strcmp(name, "nodes") == 0)
        launch->nodes = value;
    else if (strcmp(name, "nodelist") == 0)
        launch->nodelist = value;
    else if (strcmp(name, "version") == 0)
        launch->shows_version = true;
}

static bool is_operand(void *arg, const char *word)
{
    (void)arg;
    return kind_of(word) != LAUNCH_OTHER;
}

struct launch launcher_read(int argc, char *const argv[])
{
    struct launch launch = {.nodes = "", .nodelist = ""};
    const struct slurm_reader reader = {
        .option = see_option, .operand = is_operand, .arg = &launch};
    int command = slurm_args_read(SLURM_SRUN, argc, argv, &reader);
    if (command < argc)
        launch.kind = kind_of(argv[command]);
    return launch;
}

void launcher_show_errors(void)
{
    struct stat now;
    if (fstat(STDERR_FILENO, &now) < 0 || !S_ISCHR(now.st_mode) || now.st_rdev != makedev(1, 3))
        return; /* not /dev/null */
    int fd = launcher_stderr(getppid());
    if (fd < 0)
        return;
    (void)dup2(fd, STDERR_FILENO);
    (void)close(fd);
}

void launcher_end(const struct front_result *r)
{
    char name[LAUNCHER_NAME_MAX];
    pid_t parent = getppid();
    if (r->end == FRONT_EXITED && r->value < EXIT_LOST)
        return;
    /* Not a script that stands for srun, or what became our parent when mpirun has ended. */
    if (parent > 1 && launcher_is(parent, name) && kill(parent, SIGTERM) == 0)
        (void)poll(NULL, 0, NOTICE_MS);
}
