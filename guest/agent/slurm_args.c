/* SPDX-License-Identifier: Apache-2.0 */
#include "slurm_args.h"

#include <stddef.h>
#include <string.h>
#include <strings.h>

struct option {
    const char *name;
    char letter; /* 0: none */
};

/* Options that always take a value, as of Slurm's slurm_opt.c. */
static const struct option with_value[] = {
    {"accel-bind", 0},
    {"account", 'A'},
    {"acctg-freq", 0},
    {"array", 'a'},
    {"autocomplete", 0},
    {"batch", 0},
    {"bb", 0},
    {"bbf", 0},
    {"bcast-exclude", 0},
    {"begin", 'b'},
    {"chdir", 'D'},
    {"cluster", 0},
    {"cluster-constraint", 0},
    {"clusters", 'M'},
    {"comment", 0},
    {"constraint", 'C'},
    {"container", 0},
    {"container-id", 0},
    {"container-type", 0},
    {"context", 0},
    {"core-spec", 'S'},
    {"cores-per-socket", 0},
    {"cpu-bind", 0},
    {"cpu-freq", 0},
    {"cpu_bind", 0},
    {"cpus-per-gpu", 0},
    {"cpus-per-task", 'c'},
    {"deadline", 0},
    {"delay-boot", 0},
    {"dependency", 'd'},
    {"distribution", 'm'},
    {"epilog", 0},
    {"error", 'e'},
    {"exclude", 'x'},
    {"export", 0},
    {"export-file", 0},
    {"extra", 0},
    {"extra-node-info", 'B'},
    {"gid", 0},
    {"gpu-bind", 0},
    {"gpu-freq", 0},
    {"gpus", 'G'},
    {"gpus-per-node", 0},
    {"gpus-per-socket", 0},
    {"gpus-per-task", 0},
    {"gres", 0},
    {"gres-flags", 0},
    {"het-group", 0},
    {"hint", 0},
    {"ignore-signals", 0},
    {"input", 'i'},
    {"job-name", 'J'},
    {"jobid", 0},
    {"kill-on-invalid-dep", 0},
    {"licenses", 'L'},
    {"mail-type", 0},
    {"mail-user", 0},
    {"mcs-label", 0},
    {"mem", 0},
    {"mem-bind", 0},
    {"mem-per-cpu", 0},
    {"mem-per-gpu", 0},
    {"mem-update", 0},
    {"mincpus", 0},
    {"mpi", 0},
    {"msg-timeout", 0},
    {"network", 0},
    {"nodefile", 'F'},
    {"nodelist", 'w'},
    {"nodes", 'N'},
    {"ntasks", 'n'},
    {"ntasks-per-core", 0},
    {"ntasks-per-gpu", 0},
    {"ntasks-per-node", 0},
    {"ntasks-per-socket", 0},
    {"ntasks-per-tres", 0},
    {"open-mode", 0},
    {"output", 'o'},
    {"pack-group", 0},
    {"partition", 'p'},
    {"power", 0},
    {"prefer", 0},
    {"priority", 0},
    {"profile", 0},
    {"prolog", 0},
    {"qos", 'q'},
    {"relative", 'r'},
    {"reservation", 0},
    {"resources", 0},
    {"segment", 0},
    {"signal", 0},
    {"slurmd-debug", 0},
    {"sockets-per-node", 0},
    {"switches", 0},
    {"task-epilog", 0},
    {"task-prolog", 0},
    {"tasks-per-node", 0},
    {"thread-spec", 0},
    {"threads", 'T'},
    {"threads-per-core", 0},
    {"time", 't'},
    {"time-min", 0},
    {"tmp", 0},
    {"treewidth", 0},
    {"tres-bind", 0},
    {"tres-per-task", 0},
    {"uid", 0},
    {"wait-all-nodes", 0},
    {"wckey", 0},
    {"wrap", 0},
};

/* Options without a value, or with one only as --NAME=VALUE and -LVALUE. */
static const struct option without_value[] = {
    {"async", 0},
    {"bcast", 0},
    {"bell", 0},
    {"compress", 0},
    {"consolidate-segments", 0},
    {"contiguous", 0},
    {"debugger-test", 0},
    {"disable-status", 'X'},
    {"exact", 0},
    {"exclusive", 0},
    {"external", 0},
    {"external-launcher", 0},
    {"get-user-env", 0},
    {"help", 'h'},
    {"hold", 'H'},
    {"ignore-pbs", 0},
    {"immediate", 'I'},
    {"interactive", 0},
    {"kill-command", 0}, /* -K of salloc, whose options have no effect in guests */
    {"kill-on-bad-exit", 'K'},
    {"label", 'l'},
    {"multi-prog", 0},
    {"nice", 0},
    {"no-allocate", 'Z'},
    {"no-bell", 0},
    {"no-kill", 'k'},
    {"no-requeue", 0},
    {"no-shell", 0},
    {"oom-kill-step", 0},
    {"overcommit", 'O'},
    {"overlap", 0},
    {"oversubscribe", 's'},
    {"parsable", 0},
    {"preserve-env", 'E'},
    {"propagate", 0},
    {"pty", 0},
    {"quiet", 'Q'},
    {"quit-on-interrupt", 0},
    {"reboot", 0},
    {"requeue", 0},
    {"resv-ports", 0},
    {"send-libs", 0},
    {"spread-job", 0},
    {"spread-segments", 0},
    {"stepmgr", 0},
    {"test-only", 0},
    {"unbuffered", 'u'},
    {"usage", 0},
    {"use-min-nodes", 0},
    {"verbose", 'v'},
    {"version", 'V'},
    {"wait-for-children", 0},
    {"whole", 0},
};

/* Letters with an optional value, which can only be in the same word. */
static const char optional_value[] = "IKk";

/* The only option that takes a value in some of the programs: srun waits SECONDS, sbatch waits. */
static const struct option wait_option = {"wait", 'W'};

static const struct option *find_letter(const struct option *list, size_t count, char letter)
{
    for (size_t i = 0; i < count; i++)
        if (list[i].letter == letter)
            return &list[i];
    return NULL;
}

/*
 * As getopt_long: the exact name, otherwise the only name that begins so. *matches counts names
 * that begin so.
 */
static const struct option *find_name(const struct option *list, size_t count, const char *name,
                                      size_t len, size_t *matches)
{
    const struct option *found = NULL;
    for (size_t i = 0; i < count; i++) {
        if (strncmp(list[i].name, name, len) != 0)
            continue;
        found = &list[i];
        if (list[i].name[len] == '\0') {
            *matches = 1;
            return found;
        }
        ++*matches;
    }
    return found;
}

#define COUNT(list) (sizeof(list) / sizeof(list)[0])

struct place {
    enum slurm_program program;
    int argc;
    char *const *argv;
    const struct slurm_reader *reader;
    int at; /* the next word */
};

static void report(const struct place *p, const char *name, const char *value)
{
    if (p->reader->option != NULL)
        p->reader->option(p->reader->arg, name, value);
}

static const char *next_word(struct place *p)
{
    return p->at < p->argc ? p->argv[p->at++] : "";
}

/* The long option's name in Slurm's tables, or NULL; *takes_value if its value may be a word. */
static const char *identify(const struct place *p, const char *name, size_t len, bool *takes_value)
{
    size_t values = 0, flags = 0, waits = 0;
    const struct option *value = find_name(with_value, COUNT(with_value), name, len, &values);
    const struct option *flag = find_name(without_value, COUNT(without_value), name, len, &flags);
    const struct option *wait = find_name(&wait_option, 1, name, len, &waits);
    bool exact_value = value != NULL && value->name[len] == '\0';
    bool exact_flag = flag != NULL && flag->name[len] == '\0';
    *takes_value = false;
    if (wait != NULL && wait->name[len] == '\0') {
        *takes_value = p->program == SLURM_SRUN;
        return wait->name;
    }
    if (exact_flag)
        return flag->name;
    if (exact_value || (value != NULL && flag == NULL)) {
        *takes_value = true;
        return value->name;
    }
    return flag != NULL ? flag->name : NULL;
}

static void read_long(struct place *p, const char *word)
{
    size_t len = strcspn(word, "=");
    bool takes_value;
    const char *name = identify(p, word, len, &takes_value);
    if (word[len] == '=') {
        if (name != NULL)
            report(p, name, word + len + 1);
    } else if (name != NULL) {
        report(p, name, takes_value ? next_word(p) : "");
    } else if (strncmp(word, "vhpc-", 5) == 0) {
        (void)next_word(p);
    } else if (p->at < p->argc && p->argv[p->at][0] != '-' &&
               !p->reader->operand(p->reader->arg, p->argv[p->at])) {
        p->at++;
    }
}

static void read_letters(struct place *p, const char *letters)
{
    for (; *letters != '\0'; letters++) {
        const struct option *o = find_letter(with_value, COUNT(with_value), *letters);
        if (*letters == wait_option.letter && p->program == SLURM_SRUN)
            o = &wait_option;
        if (o != NULL) {
            report(p, o->name, letters[1] != '\0' ? letters + 1 : next_word(p));
            return;
        }
        o = find_letter(without_value, COUNT(without_value), *letters);
        if (o != NULL)
            report(p, o->name, "");
        if (strchr(optional_value, *letters) != NULL)
            return;
    }
}

int slurm_args_read(enum slurm_program program, int argc, char *const argv[],
                    const struct slurm_reader *reader)
{
    struct place p = {.program = program, .argc = argc, .argv = argv, .reader = reader, .at = 1};
    while (p.at < argc) {
        const char *word = argv[p.at];
        if (strcmp(word, ":") == 0) {
            p.at++;
        } else if (strcmp(word, "--") == 0) {
            return p.at + 1;
        } else if (word[0] != '-' || word[1] == '\0') {
            return p.at;
        } else {
            p.at++;
            if (word[1] == '-')
                read_long(&p, word + 2);
            else
                read_letters(&p, word + 1);
        }
    }
    return argc;
}

/* As Slurm's find_quote_token: a comma in quotes separates nothing. */
static size_t export_word(const char *text)
{
    bool single = false, twice = false;
    size_t len = 0;
    for (; text[len] != '\0' && (text[len] != ',' || single || twice); len++) {
        single = single != (text[len] == '\'');
        twice = twice != (text[len] == '"');
    }
    return len;
}

static bool is_keyword(const char *word, size_t len)
{
    static const char *const keywords[] = {"ALL", "NONE", "NIL"};
    for (size_t i = 0; i < COUNT(keywords); i++)
        if (strlen(keywords[i]) == len && strncasecmp(word, keywords[i], len) == 0)
            return true;
    return false;
}

void slurm_export_read(const char *value, slurm_name_seen *named, void *arg)
{
    for (const char *word = value; *word != '\0'; word += *word == ',') {
        size_t len = export_word(word);
        bool quoted = len > 1 && (*word == '\'' || *word == '"') && word[len - 1] == *word;
        const char *first = quoted ? word + 1 : word, *end = quoted ? word + len - 1 : word + len;
        const char *equals = memchr(first, '=', (size_t)(end - first));
        size_t name = (size_t)((equals != NULL ? equals : end) - first);
        if (name > 0 && !is_keyword(first, name))
            named(arg, first, name, equals != NULL);
        word += len;
    }
}

bool slurm_name_is_one_of(const char *name, const char *const *list)
{
    while (*list != NULL && strcmp(*list, name) != 0)
        list++;
    return *list != NULL;
}
