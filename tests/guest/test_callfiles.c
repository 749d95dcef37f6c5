/* SPDX-License-Identifier: Apache-2.0 */
/* Files that a guest can have vhpc-run prepare for its host calls. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "callfiles.h"
#include "check.h"

static struct call_files files;
static char why[256];

static struct execspec call_of(const char *name, const char *argument)
{
    struct execspec s = {0};
    assert_int_equal(execspec_add_arg(&s, name), 0);
    assert_int_equal(execspec_add_arg(&s, argument), 0);
    files = (struct call_files){0};
    return s;
}

static void add_script(struct execspec *s, const char *path)
{
    s->operand = 1;
    s->script_path = strdup(path);
    s->script = (uint8_t *)strdup("#!/bin/sh\n");
    s->script_len = strlen("#!/bin/sh\n");
}

static int prepare(struct execspec *s)
{
    return call_files_prepare(&files, s, "/run/vhpc/run.sock", why, sizeof why);
}

static void a_script_is_private_and_goes_again(void **state)
{
    (void)state;
    struct stat st;
    char content[64] = "", path[512], folder[64];
    struct execspec s = call_of("/usr/bin/sbatch", "/tmp/../x/job.sh");
    add_script(&s, "/tmp/../x/job.sh");
    assert_int_equal(prepare(&s), 0);
    (void)snprintf(path, sizeof path, "%s", s.argv[1]);
    (void)snprintf(folder, sizeof folder, "%s", files.folder);
    assert_int_equal(strncmp(path, "/tmp/vhpc-", 10), 0);
    assert_string_equal(strrchr(path, '/'), "/job.sh");
    assert_int_equal(stat(folder, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    assert_true(fread(content, 1, sizeof content - 1, f) > 0);
    (void)fclose(f);
    assert_string_equal(content, "#!/bin/sh\n");
    call_files_drop(&files);
    assert_int_equal(stat(folder, &st), -1);
    call_files_drop(&files);
    execspec_free(&s);
}

/* promise: attack.host-command */
static void a_name_stays_in_the_folder(void **state)
{
    static char huge[4096];
    const char *const names[] = {"", "/", "x/", "..", "/x/..", "x/.", huge};
    (void)state;
    memset(huge, 'x', sizeof huge - 1);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct execspec s = call_of("sbatch", "job.sh");
        add_script(&s, names[i]);
        assert_int_equal(prepare(&s), -EINVAL);
        assert_string_equal(s.argv[1], "job.sh");
        assert_string_equal(files.folder, "");
        execspec_free(&s);
    }
}

/* promise: attack.host-command */
static void other_commands_have_no_operand(void **state)
{
    static const char *const names[] = {"srun", "salloc", "squeue", "sacct", "xsbatch"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct execspec s = call_of(names[i], "x");
        add_script(&s, "/x/job.sh");
        assert_int_equal(prepare(&s), -EPROTO);
        execspec_free(&s);
    }
    struct execspec s = call_of("sbatch", "x");
    s.operand = 1;
    assert_int_equal(prepare(&s), -EPROTO);
    assert_string_equal(s.argv[1], "x");
    execspec_free(&s);
    s = call_of("srun", "x");
    assert_int_equal(prepare(&s), 0);
    assert_string_equal(s.argv[1], "x");
    execspec_free(&s);
}

static void salloc_gets_the_relay_and_its_settings(void **state)
{
    char self[512] = "";
    (void)state;
    (void)setenv("VHPC_RUN_COMMANDS", "srun:squeue", 1);
    (void)setenv("VHPC_RUN_ARGV0", "/bin/other", 1);
    (void)setenv("VHPC_RUN_SCRIPT", "1", 1);
    (void)setenv("VHPC_RUN_SOCKET", "/other.sock", 1);
    struct execspec s = call_of("salloc", "vhpc-run");
    s.operand = 1;
    assert_int_equal(prepare(&s), 0);
    assert_true(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    assert_string_equal(s.argv[1], self);
    assert_string_equal(execspec_getenv(&s, "VHPC_RUN_COMMANDS"), "srun:squeue");
    assert_string_equal(execspec_getenv(&s, "VHPC_RUN_SOCKET"), "/run/vhpc/run.sock");
    assert_null(execspec_getenv(&s, "VHPC_RUN_ARGV0"));
    assert_null(execspec_getenv(&s, "VHPC_RUN_SCRIPT"));
    execspec_free(&s);
}

static void sacctmgr_is_read_only(void **state)
{
    (void)state;
    struct execspec s = call_of("/bin/sacctmgr", "list");
    assert_int_equal(prepare(&s), 0);
    assert_string_equal(s.argv[1], "--readonly");
    assert_string_equal(s.argv[2], "list");
    execspec_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_script_is_private_and_goes_again),
        cmocka_unit_test(a_name_stays_in_the_folder),
        cmocka_unit_test(other_commands_have_no_operand),
        cmocka_unit_test(salloc_gets_the_relay_and_its_settings),
        cmocka_unit_test(sacctmgr_is_read_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
