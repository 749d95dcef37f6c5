/* SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "imageenv.h"
#include "repeatable.h"
#include "scriptfile.h"
#include "shared.h"
#include "slurm_args.h"

_Noreturn static void refuse(const char *program, const char *what, const char *value,
                             const char *why)
{
    (void)fprintf(stderr, "%s: error: %s%s: %s\n", program, what, value, why);
    exit(1);
}

/* --- options that name files ---------------------------------------------------- */

struct reading {
    const char *program;
    const char *chdir;    /* --chdir */
    const char *exported; /* --export */
    bool wraps;           /* --wrap */
    bool is_multi_prog;
    bool is_bcast;
    struct repeatable repeatable; /* of srun */
};

static const char local_file[] =
    "this path is local to the guest, but the command opens it on the host: use a folder that "
    "guest and host share";

static void check_path(const struct reading *r, const char *option, const char *path)
{
    char what[64];
    if (!path_is_local(path))
        return;
    (void)snprintf(what, sizeof what, "--%s=", option);
    refuse(r->program, what, path, local_file);
}

/* A file for a stream of srun, and not "none", "all" or the number of a task. */
static bool is_stream_file(const char *value)
{
    return strcasecmp(value, "none") != 0 && strncasecmp(value, "all", 3) != 0 && value[0] != '-' &&
           value[strspn(value, "0123456789")] != '\0';
}

static void see_option(void *arg, const char *name, const char *value)
{
    static const char *const lists[] = {"nodefile", "bbf", NULL};
    static const char *const streams[] = {"input", "output", "error", NULL};
    static const char *const programs[] = {"prolog", "epilog", "task-prolog", "task-epilog", NULL};
    struct reading *r = arg;
    bool is_srun = strcmp(r->program, "srun") == 0;
    if (strcmp(name, "chdir") == 0)
        r->chdir = value;
    if (strcmp(name, "export") == 0)
        r->exported = value;
    r->wraps = r->wraps || strcmp(name, "wrap") == 0;
    r->is_multi_prog = r->is_multi_prog || strcmp(name, "multi-prog") == 0;
    r->is_bcast = r->is_bcast || strcmp(name, "bcast") == 0;
    if (is_srun)
        repeatable_see(&r->repeatable, name, value);
    if (slurm_name_is_one_of(name, lists) ||
        (strcmp(name, "nodelist") == 0 && strchr(value, '/') != NULL)) {
        check_path(r, name, value);
    } else if (strcmp(name, "export-file") == 0) {
        if (value[0] != '\0' && value[strspn(value, "0123456789")] == '\0')
            refuse(r->program, "--export-file=", value,
                   "a descriptor of the guest does not reach the host: name a file in a folder "
                   "that guest and host share");
        check_path(r, name, value);
    } else if (is_srun && slurm_name_is_one_of(name, streams) && is_stream_file(value)) {
        check_path(r, name, value);
    } else if (is_srun && slurm_name_is_one_of(name, programs) && strchr(value, '/') != NULL) {
        check_path(r, name, value);
    }
}

/* --- sbatch, salloc, srun ------------------------------------------------------- */

static bool is_script(void *arg, const char *word)
{
    const struct reading *r = arg;
    char *path = scriptfile_find(word, r->chdir);
    bool found = path != NULL;
    free(path);
    return found;
}

static bool is_program(void *arg, const char *word)
{
    (void)arg;
    char *path = scriptfile_find(word, "");
    bool found = path != NULL && access(path, X_OK) == 0;
    free(path);
    return found;
}

static int read_args(enum slurm_program program, struct reading *r, int argc, char **argv)
{
    struct slurm_reader reader = {.option = see_option,
                                  .operand = program == SLURM_SBATCH ? is_script : is_program,
                                  .arg = r};
    return slurm_args_read(program, argc, argv, &reader);
}

/*
 * A step runs in the working directory of its srun. If the host does not have this folder, its srun
 * runs in /tmp, and vhpc-run lets the task begin where srun was called, unless --chdir names
 * another folder.
 */
static int pass_folder(const struct reading *r, struct execspec *spec)
{
    char *entry = NULL;
    int rc = 0;
    if (spec->cwd == NULL || path_is_shared(".") || (r->chdir != NULL && r->chdir[0] != '/'))
        return 0;
    if (r->chdir == NULL) {
        rc = asprintf(&entry, VHPC_CWD_VARIABLE "=%s", spec->cwd) < 0 ? -ENOMEM : 0;
        rc = rc < 0 ? rc : execspec_add_env(spec, entry);
        free(entry);
    }
    free(spec->cwd);
    spec->cwd = rc < 0 ? NULL : strdup("/tmp");
    return rc < 0 || spec->cwd == NULL ? -ENOMEM : 0;
}

static int add_all(struct execspec *spec, char **argv)
{
    int rc = 0;
    while (*argv != NULL && rc == 0)
        rc = execspec_add_arg(spec, *argv++);
    return rc;
}

/* Standard input stays unread, as it may belong to the program that comes next. */
static void drop_stdin(struct execspec *spec)
{
    spec->fd_dir[STDIN_FILENO] = 0;
    if (!spec->tty)
        return;
    /* On a terminal the output still is one; this terminal adds the carriage returns. */
    spec->tty = false;
    spec->tty_out = true;
    spec->joined = spec->fd_dir[STDERR_FILENO] == 0;
    spec->fd_dir[STDERR_FILENO] = VHPC_FD_OUT;
    spec->termios.c_oflag &= ~(tcflag_t)ONLCR;
}

/*
 * The script is a file of the guest. If the host has the same file, the host's sbatch reads it;
 * otherwise its content goes with the request. Slurm takes the name of the job and of the command
 * from the name of the file.
 */
static int describe_sbatch(int argc, char **argv, struct execspec *spec)
{
    struct reading r = {.program = "sbatch"};
    int operand = read_args(SLURM_SBATCH, &r, argc, argv);
    int rc = add_all(spec, argv + 1);
    if (rc < 0 || (operand >= argc && !r.wraps))
        return rc;
    drop_stdin(spec);
    if (r.wraps)
        return rc;
    const char *word = argv[operand];
    char *path = scriptfile_find(word, r.chdir);
    if (path == NULL)
        refuse("sbatch", "Unable to open file ", word, strerror(ENOENT));
    if (!path_is_shared(path)) {
        char why[128];
        rc = scriptfile_read(path, spec, why, sizeof why);
        if (rc < 0)
            refuse("sbatch", "Unable to open file ", path, why);
        spec->operand = (uint32_t)operand;
        spec->script_path = path;
        return 0;
    }
    /* Without a slash sbatch searches PATH, and finds other files on the host than here. */
    if (strchr(word, '/') == NULL) {
        free(spec->argv[operand]);
        spec->argv[operand] = path;
    } else {
        free(path);
    }
    return 0;
}

/*
 * salloc runs its command where it is called, which is in this guest: the host's salloc runs a
 * relay in its place (vhpc-run fills in its name). Without a command, Slurm runs the shell in a
 * step of the new job.
 */
static int describe_salloc(int argc, char **argv, struct execspec *spec)
{
    struct reading r = {.program = "salloc"};
    int operand = read_args(SLURM_SALLOC, &r, argc, argv);
    int rc = add_all(spec, argv + 1);
    rc = rc < 0 ? rc : pass_folder(&r, spec);
    if (rc < 0 || operand >= argc)
        return rc;
    rc = execspec_insert_arg(spec, (size_t)operand, "--");
    rc = rc < 0 ? rc : execspec_insert_arg(spec, (size_t)operand, "vhpc-run");
    spec->operand = (uint32_t)operand;
    return rc;
}

static int add_relative(const struct repeatable *r, struct execspec *spec)
{
    char word[32];
    (void)snprintf(word, sizeof word, "--relative=%zu", r->before);
    return r->before > 0 ? execspec_add_arg(spec, word) : 0;
}

/* After a checkpoint the agent issues a repeatable step again, perhaps on other nodes. */
static int add_step(const struct repeatable *r, char **argv, int operand, struct execspec *spec)
{
    bool repeatable = argv[operand] != NULL && repeatable_is(r), named = r->nodelist != NULL;
    int rc = 0;
    for (int i = 1; i < operand && rc == 0;) {
        int words = repeatable ? repeatable_nodelist(r, argv + i) : 0;
        named = named && words == 0;
        rc = words == 0 ? execspec_add_arg(spec, argv[i]) : add_relative(r, spec);
        i += words == 0 ? 1 : words;
    }
    if (rc == 0 && repeatable && !named)
        rc = execspec_add_env(spec, VHPC_CALL_VARIABLE "=");
    return rc < 0 ? rc : add_all(spec, argv + operand);
}

static int describe_srun(int argc, char **argv, struct execspec *spec)
{
    struct reading r = {.program = "srun"};
    int operand = read_args(SLURM_SRUN, &r, argc, argv);
    if (operand < argc && r.is_multi_prog) {
        if (path_is_local(argv[operand]))
            refuse("srun", "", argv[operand], local_file);
    } else if (operand < argc && r.is_bcast) {
        char *path = scriptfile_find(argv[operand], "");
        if (path == NULL)
            path = scriptfile_find(argv[operand], NULL); /* srun looks here last */
        if (path != NULL && !path_is_shared(path))
            refuse("srun", "--bcast: ", path, local_file);
        free(path);
    }
    if (r.exported != NULL) {
        struct image_env image = {0};
        image_env_load_all(&image);
        image_env_yield(&image, r.exported, spec);
        image_env_free(&image);
    }
    int rc = pass_folder(&r, spec);
    return rc < 0 ? rc : add_step(&r.repeatable, argv, operand, spec);
}

/* --- the others ----------------------------------------------------------------- */

/* The first word that is not an option and not an option's value; NULL if there is none. */
static const char *verb_of(char **argv)
{
    static const char *const with_value[] = {"-M", "-u", "--clusters", "--cluster", "--uid", NULL};
    for (int i = 1; argv[i] != NULL; i++)
        if (argv[i][0] != '-' && !slurm_name_is_one_of(argv[i - 1], with_value))
            return argv[i];
    return NULL;
}

/* As Slurm compares verbs: in either case, cut off after `least` letters or more. */
static bool is_verb(const char *word, const char *verb, size_t least)
{
    size_t len = strlen(word);
    return strncasecmp(word, verb, len > least ? len : least) == 0;
}

/* The host's sacctmgr is called with --readonly; this says why and what to do. */
static void check_sacctmgr(char **argv)
{
    static const struct {
        const char *verb;
        size_t least;
    } changes[] = {{"add", 3},    {"create", 3}, {"modify", 1},      {"update", 1},
                   {"delete", 3}, {"remove", 3}, {"load", 2},        {"archive", 3},
                   {"clear", 3},  {"dump", 3},   {"reconfigure", 4}, {"shutdown", 4}};
    const char *verb = verb_of(argv);
    for (size_t i = 0; verb != NULL && i < sizeof changes / sizeof changes[0]; i++)
        if (is_verb(verb, changes[i].verb, changes[i].least))
            refuse("sacctmgr", "", changes[i].verb,
                   "in a guest sacctmgr only shows (list, show, ping), because the guest's root "
                   "could use an administrator's rights; change the database on a login node");
}

/* "write batch_script JOB [FILE]" and "write config [FILE]": without FILE, in the working
 * directory. */
static void check_scontrol(int argc, char **argv)
{
    const char *verb = verb_of(argv);
    if (verb == NULL || !is_verb(verb, "write", 5))
        return;
    const char *last = argv[argc - 1];
    if (strcmp(last, "-") != 0 && path_is_local(strchr(last, '/') != NULL ? last : "."))
        refuse("scontrol", "", strchr(last, '/') != NULL ? last : "the working directory",
               local_file);
}

static bool asks(char **argv)
{
    for (int i = 1; argv[i] != NULL; i++)
        if (strncmp(argv[i], "--i", 3) == 0 ||
            (argv[i][0] == '-' && argv[i][1] != '-' && strchr(argv[i], 'i') != NULL))
            return true;
    return false;
}

/* Commands that never read their standard input, or only in some cases. */
static bool reads_stdin(const char *name, char **argv)
{
    static const char *const never[] = {"sacct",  "sinfo", "sprio",    "squeue",
                                        "sshare", "sstat", "strigger", NULL};
    if (strcmp(name, "scancel") == 0)
        return asks(argv);
    if (strcmp(name, "scontrol") == 0 || strcmp(name, "sacctmgr") == 0)
        return verb_of(argv) == NULL;
    return !slurm_name_is_one_of(name, never);
}

int request_describe(const char *name, int argc, char **argv, struct execspec *spec)
{
    int rc = execspec_add_arg(spec, name);
    if (rc < 0)
        return rc;
    if (strcmp(name, "sbatch") == 0)
        return describe_sbatch(argc, argv, spec);
    if (strcmp(name, "salloc") == 0)
        return describe_salloc(argc, argv, spec);
    if (strcmp(name, "srun") == 0)
        return describe_srun(argc, argv, spec);
    if (strcmp(name, "sacctmgr") == 0)
        check_sacctmgr(argv);
    if (strcmp(name, "scontrol") == 0)
        check_scontrol(argc, argv);
    if (!reads_stdin(name, argv))
        drop_stdin(spec);
    return add_all(spec, argv + 1);
}
