/* SPDX-License-Identifier: Apache-2.0 */
/* Directories on which the agent mounts something: which it refuses, and what it makes of links. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "check.h"
#include "mountpoint.h"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    (void)snprintf(dir, sizeof dir, "/tmp/vhpc-test-XXXXXX");
    return mkdtemp(dir) == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    static const char *const made[] = {"a/b/c", "a/b", "a", "link", "etc"};
    char path[128];

    (void)state;
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, made[i]);
        (void)remove(path);
    }
    return rmdir(dir);
}

static const char *below(const char *name)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void link_to(const char *target, const char *name)
{
    assert_int_equal(symlink(target, below(name)), 0);
}

static void missing_directories_are_made(void **state)
{
    char real[PATH_MAX];
    struct stat st;

    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(mountpoint_make(below("a/b/c"), real), 0);
        assert_string_equal(real, below("a/b/c"));
        assert_int_equal(stat(real, &st), 0);
        assert_true(S_ISDIR(st.st_mode));
    }
}

static void a_link_is_followed_and_reported(void **state)
{
    char real[PATH_MAX];

    (void)state;
    assert_int_equal(mountpoint_make(below("a"), real), 0);
    link_to("a", "link");
    assert_int_equal(mountpoint_make(below("link/b"), real), 0);
    assert_string_equal(real, below("a/b"));
}

static void a_link_to_the_guests_system_is_refused(void **state)
{
    char real[PATH_MAX];

    (void)state;
    link_to("/proc/self", "etc");
    assert_int_equal(mountpoint_make(below("etc"), real), -EINVAL);
    assert_true(strncmp(real, "/proc/", strlen("/proc/")) == 0);
}

static void only_the_uppermost_mount_counts(void **state)
{
    (void)state;
    assert_true(mountpoint_has("/proc", "proc", "proc"));
    assert_false(mountpoint_has("/proc", "ext4", "proc"));
    assert_false(mountpoint_has("/proc", "proc", "/dev/vdb"));
    assert_false(mountpoint_has("/proc/self", "proc", "proc"));
}

static void a_disk_is_not_mounted_on_the_guests_system(void **state)
{
    static const char *const bad[] = {
        "",     "/", "/usr", "/etc/a", "/proc",   "/lib64/a", "/run/vhpc", "/dev/shm",
        "/var", "a", "/a/",  "/a//b",  "/a/../b", "/a\nb",    "/.",
    };
    const struct agent tested = {.system = false};
    char text[256];

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        text[0] = '\0';
        assert_int_equal(mount_disk(&tested, bad[i], 2001, 2001, text, sizeof text), -EINVAL);
        assert_non_null(strstr(text, "a disk cannot be mounted on"));
    }
    assert_int_equal(mount_disk(&tested, "/scratch", 2001, 2001, text, sizeof text), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(missing_directories_are_made, setup, teardown),
        cmocka_unit_test_setup_teardown(a_link_is_followed_and_reported, setup, teardown),
        cmocka_unit_test_setup_teardown(a_link_to_the_guests_system_is_refused, setup, teardown),
        cmocka_unit_test(only_the_uppermost_mount_counts),
        cmocka_unit_test(a_disk_is_not_mounted_on_the_guests_system),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
