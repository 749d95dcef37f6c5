/* SPDX-License-Identifier: Apache-2.0 */
/* Folders of shares at second places, in a mount namespace: a tmpfs is the share. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "check.h"
#include "identity.h"
#include "shared.h"

enum { USER = 2001, GROUP = 2002, SECOND = 2003 };

static char dir[] = "/tmp/vhpc-test-XXXXXX";
static dev_t shared, nested;
static char text[512];

bool __wrap_path_is_shared(const char *path);
bool __wrap_path_is_shared(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && (st.st_dev == shared || st.st_dev == nested);
}

static const char *below(const char *name)
{
    static char path[4][128];
    static unsigned turn;
    char *own = path[turn++ % 4];
    (void)snprintf(own, sizeof path[0], "%s/%s", dir, name);
    return own;
}

static dev_t make(const char *name, uid_t uid, gid_t gid, mode_t mode, bool filesystem)
{
    struct stat st;
    const char *path = below(name);
    assert_int_equal(mkdir(path, 0755), 0);
    if (filesystem)
        assert_int_equal(mount("test", path, "tmpfs", 0, NULL), 0);
    assert_int_equal(chown(path, uid, gid), 0);
    assert_int_equal(chmod(path, mode), 0);
    assert_int_equal(stat(path, &st), 0);
    return st.st_dev;
}

static int setup(void **state)
{
    (void)state;
    if (unshare(CLONE_NEWNS) < 0)
        return 0; /* each test is skipped */
    assert_int_equal(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
    assert_non_null(mkdtemp(dir));
    assert_int_equal(mount("test", dir, "tmpfs", 0, NULL), 0);
    assert_int_equal(chmod(dir, 0755), 0);
    shared = make("share", 0, 0, 0755, true);
    (void)make("share/data", USER, GROUP, 0700, false);
    (void)make("share/team", 0, SECOND, 0750, false);
    (void)make("share/closed", 0, 0, 0700, false);
    (void)make("share/closed/open", 0, 0, 0755, false);
    nested = make("share/data/deep", USER, GROUP, 0755, true);
    (void)make("local", USER, GROUP, 0755, false);
    assert_int_equal(symlink("/etc", below("system")), 0);
    assert_int_equal(symlink("share/data", below("into")), 0);
    assert_int_equal(symlink("var/made", below("link")), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    if (shared == 0)
        return 0;
    (void)umount2(dir, MNT_DETACH);
    return rmdir(dir);
}

static int bound(const char *source, const char *path, bool read_only)
{
    struct identity_group groups[] = {{.gid = GROUP}, {.gid = SECOND}};
    const struct identity user = {.uid = USER,
                                  .gid = GROUP,
                                  .groups = groups,
                                  .group_count = sizeof groups / sizeof groups[0]};
    const struct agent own = {.system = true};

    if (shared == 0) {
        print_message("mounts are root's to make: run it as root\n");
        skip();
    }
    text[0] = '\0';
    int rc = bind_folder(&own, &user, source, path, read_only, text, sizeof text);
    assert_int_equal(geteuid(), 0);
    assert_int_equal(getegid(), 0);
    return rc;
}

static bool is_same(const char *one, const char *other)
{
    struct stat a, b;
    assert_int_equal(stat(one, &a), 0);
    assert_int_equal(stat(other, &b), 0);
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static int written(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return -errno;
    return close(fd);
}

static void a_folder_is_at_a_second_place(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) /* operations may be repeated */
        assert_int_equal(bound(below("share/data"), below("a/b"), false), 0);
    assert_true(is_same(below("share/data"), below("a/b")));
    assert_true(is_same(below("share/data/deep"), below("a/b/deep")));
    assert_int_equal(written(below("a/b/new")), 0);
    assert_int_equal(access(below("share/data/new"), F_OK), 0);
    assert_int_equal(umount2(below("a/b/deep"), 0), 0);
    assert_int_equal(umount2(below("a/b"), 0), 0);
    assert_false(is_same(below("share/data"), below("a/b")));
}

static void a_read_only_folder_is_so_in_shares_below_it(void **state)
{
    (void)state;
    assert_int_equal(bound(below("share/data"), below("ro"), true), 0);
    assert_int_equal(written(below("ro/file")), -EROFS);
    assert_int_equal(written(below("ro/deep/file")), -EROFS);
    assert_int_equal(written(below("share/data/file")), 0);
    assert_int_equal(written(below("share/data/deep/file")), 0);
}

static void links_of_the_image_to_missing_directories_are_followed(void **state)
{
    (void)state;
    assert_int_equal(bound(below("share/data"), below("link/x"), false), 0);
    assert_true(is_same(below("share/data"), below("var/made/x")));
}

static void the_users_groups_count(void **state)
{
    (void)state;
    assert_int_equal(bound(below("share/team"), below("team"), false), 0);
    assert_true(is_same(below("share/team"), below("team")));
}

static void is_refused(const char *source, const char *path, int number, const char *why)
{
    assert_int_equal(bound(source, path, false), number);
    assert_non_null(strstr(text, why));
}

static void other_folders_are_refused(void **state)
{
    (void)state;
    is_refused(below("share/closed"), below("x"), -EACCES, "the user cannot open");
    is_refused(below("share/closed/open"), below("x"), -EACCES, "the user cannot open");
    is_refused(below("share/none"), below("x"), -ENOENT, "the user cannot open");
    is_refused(below("local"), below("x"), -EXDEV, "it is in no shared folder");
    is_refused("/etc", below("x"), -EXDEV, "it is in no shared folder");
    is_refused("share/data", below("x"), -EINVAL, "the guest's own system");
    is_refused(below("share/data"), "/etc/x", -EINVAL, "the guest's own system");
    assert_int_equal(access(below("x"), F_OK), -1);
    is_refused(below("share/data"), below("system"), -EINVAL, "links of the image lead to");
    is_refused(below("share/team"), below("into"), -EBUSY, "it is in a shared folder");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_folder_is_at_a_second_place),
        cmocka_unit_test(a_read_only_folder_is_so_in_shares_below_it),
        cmocka_unit_test(links_of_the_image_to_missing_directories_are_followed),
        cmocka_unit_test(the_users_groups_count),
        cmocka_unit_test(other_folders_are_refused),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
