/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "state.h"
#include "text.h"

#define READY                                                                                      \
    "version=1\njob=42\nrestart=0\ngeneration=42.0.9f3ac1d2\nstatus=ready\n"                       \
    "image=debian-minimal:latest\ndigest=sha256:00\nbatch=guest\n"                                 \
    "socket=/run/vhpc/jobs/42/g0/run.sock\ncommands=srun:scontrol\n"                               \
    "command_path=/opt/slurm/bin\ngpus=2:5\ncpus=4:6\nattach=batch\n"

#define PLAIN                                                                                      \
    "version=1\njob=42\nrestart=0\ngeneration=42.0.9f3ac1d2\nstatus=ready\n"                       \
    "image=debian-minimal:latest\ndigest=sha256:00\nbatch=guest\n"
#define SEVERAL PLAIN "socket=/run/vhpc/jobs/42/g0/run.sock\n"

static struct vhpc_state state;
static char why[VHPC_WHY_SIZE];

static bool parse(const char *text)
{
    why[0] = '\0';
    return vhpc_state_parse(&state, text, strlen(text), why, sizeof why);
}

static void is_refused(const char *text, const char *reason)
{
    assert_false(parse(text));
    assert_null(state.bytes);
    if (strstr(why, reason) == NULL)
        fail_msg("'%s' was refused because '%s', not '%s'", text, why, reason);
}

static void a_ready_job_is_understood(void **unused)
{
    (void)unused;
    assert_true(parse(READY));
    assert_int_equal(state.job, 42);
    assert_int_equal(state.restart, 0);
    assert_int_equal(state.status, VHPC_READY);
    assert_false(state.batch_on_host);
    assert_string_equal(state.generation, "42.0.9f3ac1d2");
    assert_string_equal(state.image, "debian-minimal:latest");
    assert_string_equal(state.socket, "/run/vhpc/jobs/42/g0/run.sock");
    assert_string_equal(state.commands, "srun:scontrol");
    assert_string_equal(state.command_path, "/opt/slurm/bin");
    assert_string_equal(state.gpus, "2:5");
    assert_string_equal(state.cpus, "4:6");
    assert_string_equal(state.attach, "batch");
    vhpc_state_free(&state);
}

static void has(uint32_t guest, const char *socket, const char *gpus)
{
    char text[VHPC_STATE_LINE_MAX + 1];

    assert_true(vhpc_state_socket(&state, guest, text, sizeof text));
    assert_string_equal(text, socket);
    assert_true(vhpc_state_gpus(&state, guest, text, sizeof text));
    assert_string_equal(text, gpus);
}

static void a_state_without_a_number_of_guests_has_one(void **unused)
{
    (void)unused;
    assert_true(parse(READY));
    assert_int_equal(state.guests, 1);
    has(0, "/run/vhpc/jobs/42/g0/run.sock", "2:5");
    for (uint32_t task = 0; task < 4; task++)
        assert_int_equal(vhpc_state_guest_of(&state, task, 4), 0);
    vhpc_state_free(&state);
}

static void each_of_several_guests_has_its_socket_and_gpus(void **unused)
{
    char small[8];

    (void)unused;
    assert_true(parse(SEVERAL "guests=3\ngpus=2:5,,7\n"));
    assert_int_equal(state.guests, 3);
    has(0, "/run/vhpc/jobs/42/g0/run.sock", "2:5");
    has(1, "/run/vhpc/jobs/42/g1/run.sock", "");
    has(2, "/run/vhpc/jobs/42/g2/run.sock", "7");
    assert_false(vhpc_state_socket(&state, 1, small, sizeof small));
    assert_false(vhpc_state_gpus(&state, 0, small, 3));
    assert_false(vhpc_state_cpus(&state, 0, small, 0));
    vhpc_state_free(&state);
    assert_true(parse(SEVERAL "guests=3\ncpus=2:5,8,7:9\n"));
    assert_true(vhpc_state_cpus(&state, 2, small, sizeof small));
    assert_string_equal(small, "7:9");
    vhpc_state_free(&state);
    assert_true(parse(SEVERAL "guests=12\n"));
    has(11, "/run/vhpc/jobs/42/g11/run.sock", "");
    vhpc_state_free(&state);
}

/* promise: place.guests */
static void tasks_fill_guests_in_blocks(void **unused)
{
    static const struct {
        uint32_t guests, tasks;
        const char *expected;
    } cases[] = {{2, 4, "0011"}, {2, 5, "00011"}, {3, 3, "012"}, {3, 7, "0001122"},
                 {4, 2, "02"},   {4, 1, "0"},     {2, 1, "0"}};

    (void)unused;
    assert_true(parse(SEVERAL "guests=2\n"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        state.guests = cases[i].guests;
        for (uint32_t task = 0; task < cases[i].tasks; task++)
            assert_int_equal(vhpc_state_guest_of(&state, task, cases[i].tasks),
                             (uint32_t)(cases[i].expected[task] - '0'));
    }
    /* a combination that Slurm never produces */
    assert_int_equal(vhpc_state_guest_of(&state, 0, 0), 0);
    assert_int_equal(vhpc_state_guest_of(&state, 5, 5), 0);
    vhpc_state_free(&state);
}

static void a_number_of_guests_without_their_sockets_is_refused(void **unused)
{
    (void)unused;
    is_refused(SEVERAL "guests=0\n", "guests is not a number");
    is_refused(SEVERAL "attach=7\n", "attach is not batch");
    is_refused(SEVERAL "guests=65\n", "guests is not a number");
    is_refused(SEVERAL "guests=two\n", "guests is not a number");
    is_refused(PLAIN "socket=/run/vhpc/jobs/42/g0/run.sock\ncommand_path=bin\n",
               "command_path is not an absolute path");
    is_refused(PLAIN "socket=/run/elsewhere.sock\nguests=2\n", "guests is not a number");
    is_refused(PLAIN "socket=/g0/run.sock\nguests=2\n", "guests is not a number");
}

static void components_are_a_number(void **unused)
{
    (void)unused;
    assert_true(parse(READY));
    assert_int_equal(state.components, 0);
    vhpc_state_free(&state);
    assert_true(parse(READY "components=3\n"));
    assert_int_equal(state.components, 3);
    vhpc_state_free(&state);
    is_refused(READY "components=two\n", "components is not a number");
    is_refused(READY "components=\n", "components is not a number");
    is_refused(READY "components=4294967296\n", "components is not a number");
}

static void a_failed_job_says_why(void **unused)
{
    (void)unused;
    assert_true(
        parse("version=1\nstatus=failed\nkind=user\nmessage=image x: it = panics \xe2\x80\x93 "
              "choose another\njob=4294967295\nrestart=3\ngeneration=4294967295.3.00000000\n"
              "image=x:1\nbatch=host\n"));
    assert_int_equal(state.status, VHPC_FAILED);
    assert_string_equal(state.message, "image x: it = panics \xe2\x80\x93 choose another");
    assert_true(state.batch_on_host);
    assert_string_equal(state.commands, "");
    assert_string_equal(state.command_path, "");
    assert_string_equal(state.gpus, "");
    assert_string_equal(state.cpus, "");
    vhpc_state_free(&state);
}

static void a_failed_job_without_message_still_says_something(void **unused)
{
    (void)unused;
    assert_true(
        parse("version=1\nstatus=failed\njob=1\nrestart=0\ngeneration=1.0.00000000\nimage=x:1\n"));
    assert_true(strlen(state.message) > 20);
    vhpc_state_free(&state);
}

static void keys_of_later_versions_are_left_alone(void **unused)
{
    (void)unused;
    assert_true(parse(READY "guests=2\nnetwork=none\nempty=\nwarning=look here: x\n"));
    assert_string_equal(state.warning, "look here: x");
    vhpc_state_free(&state);
}

static void what_is_malformed_is_refused(void **unused)
{
    (void)unused;
    is_refused("", "empty");
    is_refused("version=1", "incomplete");
    is_refused(READY "\n", "key=value");
    is_refused(READY "=x\n", "key=value");
    is_refused(READY "status=failed\n", "twice");
    is_refused(READY "x=\x1b[2J\n", "control");
    is_refused(READY "x=\xff\n", "control");
    is_refused("version=2\n", "version");
    is_refused("job=42\n", "version");
    is_refused("version=1\njob=-1\n", "job");
    is_refused("version=1\njob=0\n", "job");
    is_refused("version=1\njob=4294967296\n", "job");
    is_refused("version=1\njob=1\n", "restart");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=2.0.00000000\n", "generation");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.1.00000000\n", "generation");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.0000000\n", "generation");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.0000000G\n", "generation");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.00000000\nstatus=done\n", "status");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.00000000\nstatus=ready\n", "image");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.00000000\nstatus=ready\nimage=x:1\n",
               "socket");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.00000000\nstatus=ready\nimage=x:1\n"
               "socket=run.sock\n",
               "socket");
    is_refused("version=1\njob=1\nrestart=0\ngeneration=1.0.00000000\nstatus=booting\nimage=x:1\n"
               "batch=both\n",
               "batch");
}

static void a_nul_byte_is_refused(void **unused)
{
    static const char text[] = "version=1\njob=42\0\n";

    (void)unused;
    assert_false(vhpc_state_parse(&state, text, sizeof text - 1, why, sizeof why));
    assert_non_null(strstr(why, "control"));
}

static void lines_and_files_are_bounded(void **unused)
{
    static char text[VHPC_STATE_MAX + 2];
    size_t used = (size_t)snprintf(text, sizeof text, "%sx=", READY);

    (void)unused;
    memset(text + used, 'y', VHPC_STATE_LINE_MAX - 2);
    memcpy(text + used + VHPC_STATE_LINE_MAX - 2, "\n", 2);
    assert_true(parse(text));
    vhpc_state_free(&state);
    memcpy(text + used + VHPC_STATE_LINE_MAX - 2, "y\n", 3);
    is_refused(text, "longer than 4096");
    memset(text, 'a', sizeof text);
    assert_false(vhpc_state_parse(&state, text, VHPC_STATE_MAX + 1, why, sizeof why));
    assert_non_null(strstr(why, "larger than 131072"));
}

/* --- files ----------------------------------------------------------------- */

static char run_dir[] = "/tmp/vhpc-test-state-XXXXXX";
static char path[256];

static int make_run_dir(void **unused)
{
    (void)unused;
    if (mkdtemp(run_dir) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/jobs", run_dir);
    if (mkdir(path, 0711) != 0)
        return -1;
    snprintf(path, sizeof path, "%s/jobs/42", run_dir);
    if (mkdir(path, 0711) != 0)
        return -1;
    snprintf(path, sizeof path, "%s/jobs/42/state", run_dir);
    return 0;
}

static int remove_run_dir(void **unused)
{
    char directory[256];

    (void)unused;
    (void)unlink(path);
    snprintf(directory, sizeof directory, "%s/jobs/42", run_dir);
    (void)rmdir(directory);
    snprintf(directory, sizeof directory, "%s/jobs", run_dir);
    (void)rmdir(directory);
    return rmdir(run_dir);
}

static void put(const char *text, size_t length, mode_t mode)
{
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);

    assert_true(file >= 0);
    assert_int_equal(write(file, text, length), length);
    assert_int_equal(fchmod(file, mode), 0);
    close(file);
}

static enum vhpc_state_found look(uint32_t job, uid_t owner)
{
    why[0] = '\0';
    return vhpc_state_read(&state, run_dir, job, owner, why, sizeof why);
}

static void a_job_without_directory_or_file_has_no_guests(void **unused)
{
    (void)unused;
    (void)unlink(path);
    assert_int_equal(look(41, getuid()), VHPC_STATE_ABSENT);
    assert_int_equal(look(42, getuid()), VHPC_STATE_ABSENT);
}

static void the_owners_file_is_read(void **unused)
{
    (void)unused;
    put(READY, strlen(READY), 0644);
    assert_int_equal(look(42, getuid()), VHPC_STATE_OK);
    assert_int_equal(state.job, 42);
    vhpc_state_free(&state);
}

/* promise: attack.state-file */
static void a_file_of_another_user_is_not_trusted(void **unused)
{
    (void)unused;
    put(READY, strlen(READY), 0644);
    assert_int_equal(look(42, getuid() + 1), VHPC_STATE_BAD);
    assert_non_null(strstr(why, "other than uid"));
}

static void a_file_others_may_write_is_not_trusted(void **unused)
{
    (void)unused;
    put(READY, strlen(READY), 0664);
    assert_int_equal(look(42, getuid()), VHPC_STATE_BAD);
    put(READY, strlen(READY), 0646);
    assert_int_equal(look(42, getuid()), VHPC_STATE_BAD);
}

/* promise: attack.state-file */
static void a_link_is_not_followed(void **unused)
{
    (void)unused;
    (void)unlink(path);
    assert_int_equal(symlink("/proc/self/status", path), 0);
    assert_int_equal(look(42, getuid()), VHPC_STATE_BAD);
    (void)unlink(path);
}

static void a_fifo_does_not_hang_the_task(void **unused)
{
    (void)unused;
    (void)unlink(path);
    assert_int_equal(mkfifo(path, 0644), 0);
    assert_int_equal(look(42, getuid()), VHPC_STATE_BAD);
    assert_non_null(strstr(why, "not a regular file"));
    (void)unlink(path);
}

static void a_file_that_is_too_large_is_refused(void **unused)
{
    static char text[VHPC_STATE_MAX + 100];

    (void)unused;
    memset(text, '\n', sizeof text);
    put(text, sizeof text, 0644);
    assert_int_equal(look(42, getuid()), VHPC_STATE_BAD);
    assert_non_null(strstr(why, "larger than"));
}

int main(void)
{
    const struct CMUnitTest contents[] = {
        cmocka_unit_test(a_ready_job_is_understood),
        cmocka_unit_test(a_state_without_a_number_of_guests_has_one),
        cmocka_unit_test(each_of_several_guests_has_its_socket_and_gpus),
        cmocka_unit_test(tasks_fill_guests_in_blocks),
        cmocka_unit_test(a_number_of_guests_without_their_sockets_is_refused),
        cmocka_unit_test(components_are_a_number),
        cmocka_unit_test(a_failed_job_says_why),
        cmocka_unit_test(a_failed_job_without_message_still_says_something),
        cmocka_unit_test(keys_of_later_versions_are_left_alone),
        cmocka_unit_test(what_is_malformed_is_refused),
        cmocka_unit_test(a_nul_byte_is_refused),
        cmocka_unit_test(lines_and_files_are_bounded),
    };
    const struct CMUnitTest files[] = {
        cmocka_unit_test(a_job_without_directory_or_file_has_no_guests),
        cmocka_unit_test(the_owners_file_is_read),
        cmocka_unit_test(a_file_of_another_user_is_not_trusted),
        cmocka_unit_test(a_file_others_may_write_is_not_trusted),
        cmocka_unit_test(a_link_is_not_followed),
        cmocka_unit_test(a_fifo_does_not_hang_the_task),
        cmocka_unit_test(a_file_that_is_too_large_is_refused),
    };
    int failed = cmocka_run_group_tests(contents, NULL, NULL);

    return failed + cmocka_run_group_tests(files, make_run_dir, remove_run_dir);
}
