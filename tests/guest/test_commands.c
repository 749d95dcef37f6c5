/* SPDX-License-Identifier: Apache-2.0 */
/* Slurm's commands of an image are covered by the agent's file; saving sees those below. */
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "commands.h"
#include "rootfiles.h"

static char top[] = "/tmp/commandsXXXXXX";
static char agent[64];

static const char *below(const char *name)
{
    static char path[4][PATH_MAX];
    static unsigned next;
    char *one = path[next++ % 4];
    (void)snprintf(one, PATH_MAX, "%s/%s", top, name);
    return one;
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, 0755), 0);
}

static const char *content(const char *path)
{
    static char text[2][64];
    static unsigned next;
    char *one = text[next++ % 2];
    FILE *f = fopen(path, "r");
    if (f == NULL)
        return "";
    one[fread(one, 1, 63, f)] = '\0';
    (void)fclose(f);
    return one;
}

/* Folders of an image in a mount namespace of the test's own. */
static void make_image(void)
{
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
        print_message("mounts are root's to make: run it as root\n");
        skip();
    }
    strcpy(top, "/tmp/commandsXXXXXX");
    assert_non_null(mkdtemp(top));
    assert_int_equal(mount("tmpfs", top, "tmpfs", 0, NULL), 0);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(mkdir(below((const char *[]){"one", "two", "opt"}[i]), 0755), 0);
    (void)snprintf(agent, sizeof agent, "%s/agent", top);
    write_text(agent, "agent");
}

static void remove_image(void)
{
    assert_int_equal(umount2(top, MNT_DETACH), 0);
    assert_int_equal(rmdir(top), 0);
}

/* The search path is one and two, with folders that are not searched before each. */
static void cover(void)
{
    char *const names[] = {(char[]){"srun"}, (char[]){"squeue"}, (char[]){"sinfo"},
                           (char[]){"sacct"}};
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "relative::%s/one:/nowhere:%s/two:", top, top);
    commands_cover(agent, path, names, 4);
    assert_int_equal(commands_link(agent, below("two"), names, 4), 0);
}

/* promise: image.commands */
static void each_file_with_a_name_is_covered_and_stays_below(void **state)
{
    (void)state;
    make_image();
    write_text(below("one/srun"), "image's");
    write_text(below("one/other"), "image's other");
    write_text(below("opt/squeue-24.11"), "image's squeue");
    assert_int_equal(symlink("../opt/squeue-24.11", below("two/squeue")), 0);
    cover();
    cover(); /* a second time: nothing changes */
    assert_string_equal(content(below("one/srun")), "agent");
    assert_string_equal(content(below("two/srun")), "agent");   /* a link: the image has none */
    assert_string_equal(content(below("two/squeue")), "agent"); /* through the image's link */
    assert_string_equal(content(below("opt/squeue-24.11")), "agent");
    assert_string_equal(content(below("one/other")), "image's other");
    assert_int_equal(umount2(below("one/srun"), 0), 0);
    assert_string_equal(content(below("one/srun")), "image's");
    assert_int_equal(umount2(below("opt/squeue-24.11"), 0), 0);
    remove_image();
}

/* promise: image.commands */
static void a_program_for_several_names_stays(void **state)
{
    (void)state;
    make_image();
    write_text(below("opt/multi"), "many commands");
    write_text(below("opt/sinfosys"), "another");
    assert_int_equal(symlink(below("opt/multi"), below("one/srun")), 0);
    assert_int_equal(symlink(below("opt/sinfosys"), below("one/sinfo")), 0);
    assert_int_equal(symlink("loop", below("one/loop")), 0);
    assert_int_equal(symlink("loop", below("one/sacct")), 0);
    assert_int_equal(mkdir(below("one/squeue"), 0755), 0);
    cover();
    assert_string_equal(content(below("opt/multi")), "many commands");
    assert_string_equal(content(below("opt/sinfosys")), "another");
    assert_string_equal(content(below("two/sacct")), "agent");
    remove_image();
}

/* promise: tools.save */
static void a_command_sees_the_root_below_its_mounts(void **state)
{
    char mounted[PATH_MAX + 32];
    int status, fd;
    (void)state;
    make_image();
    if (access("/run/vhpc", F_OK) < 0 && mkdir("/run/vhpc", 0755) < 0)
        skip();
    write_text(below("result"), "");
    (void)snprintf(mounted, sizeof mounted, "[ -d .%s ] && ! [ -e .%s ] && echo below", top, agent);
    fd = open(below("result"), O_WRONLY | O_CLOEXEC);
    pid_t child = fork();
    if (child == 0) {
        char *argv[] = {(char[]){"sh"}, (char[]){"-c"}, mounted, NULL};
        (void)dup2(fd, STDOUT_FILENO);
        _exit(rootfiles_main(argv));
    }
    (void)close(fd);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_string_equal(content(below("result")), "below\n");
    assert_int_equal(access("/run/vhpc/etc", F_OK), -1); /* the view was the child's own */
    remove_image();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_file_with_a_name_is_covered_and_stays_below),
        cmocka_unit_test(a_program_for_several_names_stays),
        cmocka_unit_test(a_command_sees_the_root_below_its_mounts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
