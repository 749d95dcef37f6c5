/* SPDX-License-Identifier: Apache-2.0 */
/* The files that the agent writes in a guest, and the directories where it refuses to mount. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "accounts.h"
#include "agent.h"
#include "check.h"
#include "devnodes.h"
#include "directory.h"
#include "file.h"
#include "identity.h"
#include "stepdir.h"
#include "textfile.h"

static char dir[64], file[96];

static int setup(void **state)
{
    (void)state;
    (void)snprintf(dir, sizeof dir, "/tmp/vhpc-test-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    (void)snprintf(file, sizeof file, "%s/passwd", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)unlink(file);
    return rmdir(dir);
}

static void an_absent_account_is_appended(void **state)
{
    (void)state;
    put_text(file, "root:x:0:0::/root:/bin/sh\nbin:x:2:2::/:/bin/false");
    assert_int_equal(accounts_put(file, "alice", 2001, "alice:*:2001:2001::/home/alice:/bin/sh"),
                     0);
    expect_text(file, "root:x:0:0::/root:/bin/sh\nbin:x:2:2::/:/bin/false\n"
                      "alice:*:2001:2001::/home/alice:/bin/sh\n");
}

static void an_account_of_the_same_name_is_replaced(void **state)
{
    (void)state;
    put_text(file, "root:x:0:0:::\nalice:x:1000:1000:::\nalice2:x:1001:1001:::\n");
    assert_int_equal(accounts_put(file, "alice", 2001, "alice:*:2001:2001:::"), 0);
    expect_text(file, "root:x:0:0:::\nalice2:x:1001:1001:::\nalice:*:2001:2001:::\n");
}

static void an_account_of_the_same_id_stays_behind_ours(void **state)
{
    (void)state;
    put_text(file, "root:x:0:0:::\ndebian:x:1000:1000:::\n");
    assert_int_equal(accounts_put(file, "carol", 1000, "carol:*:1000:1000:::"), 0);
    expect_text(file, "root:x:0:0:::\ncarol:*:1000:1000:::\ndebian:x:1000:1000:::\n");
    /* A second time changes nothing. */
    assert_int_equal(accounts_put(file, "carol", 1000, "carol:*:1000:1000:::"), 0);
    expect_text(file, "root:x:0:0:::\ncarol:*:1000:1000:::\ndebian:x:1000:1000:::\n");
}

static void shares_are_not_mounted_over_the_system(void **state)
{
    static const char *const refused[] = {
        "/",      "/usr",     "/var",       "/etc",         "/etc/ssh", "/bin", "/sbin",
        "/lib",   "/lib64",   "/libx32",    "/dev/shm",     "/proc/1",  "/sys", "/run/vhpc",
        "/boot",  "/usr/bin", "/usr/lib/x", "/usr/lib64",   "home",     "",     "/a/../b",
        "/a/./b", "/a//b",    "/a/",        "/usr/lib32/x",
    };
    static const char *const taken[] = {"/home/alice", "/scratch", "/var/scratch", "/usr/local",
                                        "/library",    "/tmp",     "/usr/share/x", "/etcetera"};
    struct agent a = {.system = false};
    char text[512];
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (mount_share(&a, "t", refused[i], false, text, sizeof text) != -EINVAL)
            fail_msg("%s was not refused", refused[i]);
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++)
        if (mount_share(&a, "t", taken[i], false, text, sizeof text) != 0)
            fail_msg("%s was refused", taken[i]);
    assert_int_equal(mount_share(&a, "", "/x", false, text, sizeof text), -EINVAL);
    assert_int_equal(mount_share(&a, "a,b", "/x", false, text, sizeof text), -EINVAL);
}

static void identities_that_would_break_a_file_are_refused(void **state)
{
    struct agent a = {.system = false};
    struct identity id = {.hostname = (char[]){"n1"},
                          .user = (char[]){"alice"},
                          .uid = 2001,
                          .gid = 2001,
                          .home = (char[]){"/home/alice"},
                          .shell = (char[]){"/bin/sh"}};
    char text[512];
    (void)state;
    assert_int_equal(identity_apply(&a, &id, text, sizeof text), 0);
    struct identity bad = id;
    bad.user = (char[]){"a:b"};
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
    bad = id;
    bad.uid = 0;
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
    bad = id;
    bad.gecos = (char[]){"x\nroot2:x:0:0"};
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
    bad = id;
    bad.hostname = (char[]){"n1\n"};
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
    bad = id;
    char *command = (char[]){"../../bin/x"};
    bad.commands = &command;
    bad.command_count = 1;
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
    bad = id;
    bad.timezone = (char[]){"../../etc/passwd"};
    assert_int_equal(identity_apply(&a, &bad, text, sizeof text), -EINVAL);
}

/* Names of directories such as Active Directory, as they are on a node. */
static void names_of_other_directories_are_accepted(void **state)
{
    char *const names[] = {
        (char[]){"domain users"}, (char[]){"EXAMPLE\\domain users"}, (char[]){"a,b"},
        (char[]){"dev/ops"},      (char[]){"grün@example.org"},      (char[]){"x.y"},
    };
    char *const refused[] = {(char[]){""},   (char[]){"a:b"}, (char[]){"a\nb"},
                             (char[]){"#a"}, (char[]){"+a"},  (char[]){" a"}};
    char long_name[201];
    struct agent a = {.system = false};
    struct identity_group group = {.gid = 1073741825};
    struct identity id = {.hostname = (char[]){"n1"},
                          .uid = 2001,
                          .gid = 2001,
                          .home = (char[]){"/home/Alice Doe"},
                          .shell = (char[]){"/opt/my shell/sh"},
                          .groups = &group,
                          .group_count = 1};
    char text[512];
    (void)state;
    memset(long_name, 'g', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    group.name = id.user = long_name;
    assert_int_equal(identity_apply(&a, &id, text, sizeof text), 0);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        group.name = id.user = names[i];
        if (identity_apply(&a, &id, text, sizeof text) != 0)
            fail_msg("%s was refused: %s", names[i], text);
    }
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        group.name = refused[i];
        assert_int_equal(identity_apply(&a, &id, text, sizeof text), -EINVAL);
    }
}

static void links_are_followed_to_what_is_made(void **state)
{
    char path[160], target[160];
    struct stat st;
    (void)state;
    (void)snprintf(path, sizeof path, "%s/home", dir);
    assert_int_equal(symlink("var/home", path), 0);
    (void)snprintf(path, sizeof path, "%s/home/alice", dir);
    assert_int_equal(directory_make(path, 0755), 0);
    (void)snprintf(path, sizeof path, "%s/var/home/alice", dir);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(directory_make(path, 0755), 0);
    (void)snprintf(path, sizeof path, "%s/opt", dir);
    (void)snprintf(target, sizeof target, "%s/var/opt/", dir);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(directory_make(path, 0755), 0);
    assert_int_equal(stat(target, &st), 0);
    (void)snprintf(path, sizeof path, "%s/loop", dir);
    assert_int_equal(symlink("loop", path), 0);
    assert_int_equal(directory_make(path, 0755), -ELOOP);
    put_text(file, "a file");
    (void)snprintf(path, sizeof path, "%s/x", file);
    assert_int_equal(directory_make(path, 0755), -ENOTDIR);
    assert_int_equal(directory_make("relative", 0755), -EINVAL);
    static const char *const made[] = {"loop",     "opt", "var/opt", "var/home/alice",
                                       "var/home", "var", "home"};
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, made[i]);
        assert_int_equal(remove(path), 0);
    }
}

static void device_nodes_have_the_modes_of_udev(void **state)
{
    struct stat st;
    char path[160];
    (void)state;
    put_text(file, "root:x:0:\nvideo:x:44:\n");
    static const struct {
        const char *name;
        mode_t before, after;
        gid_t group;
    } nodes[] = {{"fuse", 0600, 0666, 0},        {"kvm", 0640, 0640, 0},
                 {"dri/card0", 0600, 0660, 44},  {"dri/renderD128", 0600, 0666, 0},
                 {"net/tun", 0600, 0666, 0},     {"infiniband/umad0", 0600, 0600, 0},
                 {"loop-control", 0600, 0660, 0}};
    static const char *const folders[] = {"dri", "net", "infiniband"};
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, folders[i]);
        assert_int_equal(mkdir(path, 0755), 0);
    }
    bool may = true;
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, nodes[i].name);
        may = may && mknod(path, S_IFCHR | 0600, makedev(1, 3)) == 0 &&
              chmod(path, nodes[i].before) == 0;
    }
    if (may)
        devnodes_apply(dir, file);
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, nodes[i].name);
        if (may && (stat(path, &st) < 0 || (st.st_mode & 07777) != nodes[i].after ||
                    st.st_gid != nodes[i].group))
            fail_msg("%s has mode %o and group %u", nodes[i].name, st.st_mode & 07777, st.st_gid);
    }
    devnodes_regroup(dir, file, "video", 39); /* the site's number for the image's group */
    devnodes_regroup(dir, file, "absent", 40);
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, nodes[i].name);
        if (may && (stat(path, &st) < 0 || (st.st_mode & 07777) != nodes[i].after ||
                    st.st_gid != (nodes[i].group == 44 ? 39 : nodes[i].group)))
            fail_msg("%s has then mode %o, group %u", nodes[i].name, st.st_mode & 07777, st.st_gid);
        (void)unlink(path);
    }
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, folders[i]);
        (void)rmdir(path);
    }
    if (!may) {
        print_message("device nodes cannot be made here: run as root\n");
        skip();
    }
}

static void terminals_have_the_images_group_tty(void **state)
{
    static const struct {
        const char *groups;
        gid_t group;
    } images[] = {{"root:x:0:\ntty:x:77:\nttys:x:78:\n", 77},
                  {"root:x:0:\n", 5},
                  {"", 5},
                  {"tty:x:0:\n", 5},
                  {"tty:x:4294967295:\n", 5}};
    (void)state;
    for (size_t i = 0; i < sizeof images / sizeof *images; i++) {
        put_text(file, images[i].groups);
        assert_int_equal(devnodes_terminal_group(file), images[i].group);
    }
    (void)unlink(file);
    assert_int_equal(devnodes_terminal_group(file), 5);
}

static void a_batch_script_is_written_once_and_only_over_itself(void **state)
{
    struct execspec spec = {.uid = (uint32_t)getuid(), .gid = (uint32_t)getgid()};
    bool written;
    struct stat st;
    char path[128];
    (void)state;
    (void)snprintf(path, sizeof path, "%s/spool/job1/slurm_script", dir);
    spec.script_path = path;
    spec.script = (uint8_t *)(char[]){"#!/bin/sh\n"};
    spec.script_len = 10;
    assert_int_equal(script_write(&spec, &written), 0);
    assert_true(written);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0500);
    assert_int_equal(st.st_size, 10);
    assert_int_equal(script_write(&spec, &written),
                     0); /* the file exists already, as on a shared spool */
    assert_false(written);
    spec.script_len = 9;
    assert_int_equal(script_write(&spec, &written), -EEXIST);
    script_remove(&spec);
    assert_int_equal(stat(path, &st), -1);
    (void)snprintf(path, sizeof path, "%s/spool/job1", dir);
    (void)rmdir(path);
    (void)snprintf(path, sizeof path, "%s/spool", dir);
    (void)rmdir(path);
}

static void a_steps_directory_has_slurms_name(void **state)
{
    static const char *const others[] = {"",
                                         "slurm.pmix.",
                                         "slurm.pmix.1",
                                         "slurm.pmix.1.",
                                         "slurm.pmix.1.2.3",
                                         "slurm.pmix.1./../x",
                                         "slurm.pmix.-1.2",
                                         "slurm.pmix.12345678901.2",
                                         "prterun-vm-11@1",
                                         NULL};
    char name[STEPDIR_NAME_MAX];
    (void)state;
    assert_true(stepdir_name("slurm.pmix.4294967295.4294967294", 4294967295u, name));
    assert_string_equal(name, "spmix_appdir_4294967295_4294967295.4294967294");
    for (const char *const *other = others; *other != NULL; other++)
        assert_false(stepdir_name(*other, 1000, name));
    assert_false(stepdir_name(NULL, 1000, name));
}

static void put_below(const char *name, bool folder)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    if (folder) {
        assert_int_equal(mkdir(path, 0700), 0);
    } else {
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        (void)close(fd);
    }
}

static bool is_there(const char *name, struct stat *st)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return lstat(path, st) == 0;
}

static void a_steps_directory_is_removed_with_its_files(void **state)
{
    struct stat st;
    char link[128], path[128];
    uint32_t uid = (uint32_t)geteuid(), gid = (uint32_t)getegid();
    (void)state;
    put_below("kept", true);
    put_below("kept/file", false);
    assert_int_equal(stepdir_make(dir, "step", uid, gid), 0);
    assert_int_equal(stepdir_make(dir, "step", uid, gid), 0); /* the second task */
    assert_true(is_there("step", &st));
    assert_int_equal(st.st_mode & 07777, 0700);
    assert_int_equal(st.st_uid, uid);
    put_below("step/file", false);
    put_below("step/a", true);
    put_below("step/a/b", true);
    put_below("step/a/b/file", false);
    (void)snprintf(link, sizeof link, "%s/step/link", dir);
    (void)snprintf(path, sizeof path, "%s/kept", dir);
    assert_int_equal(symlink(path, link), 0);
    stepdir_remove(dir, "step", uid + 1); /* another user's */
    assert_true(is_there("step/a/b/file", &st));
    stepdir_remove(dir, "step", uid);
    assert_false(is_there("step", &st));
    assert_true(is_there("kept/file", &st));
    stepdir_remove(dir, "step", uid);
    /* A link of the name is not followed, and stays. */
    (void)snprintf(link, sizeof link, "%s/step", dir);
    assert_int_equal(symlink(path, link), 0);
    stepdir_remove(dir, "step", uid);
    assert_true(is_there("kept/file", &st));
    assert_int_equal(unlink(link), 0);
    stepdir_remove(dir, "kept", uid);
    assert_false(is_there("kept", &st));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(an_absent_account_is_appended, setup, teardown),
        cmocka_unit_test_setup_teardown(an_account_of_the_same_name_is_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(an_account_of_the_same_id_stays_behind_ours, setup,
                                        teardown),
        cmocka_unit_test(shares_are_not_mounted_over_the_system),
        cmocka_unit_test(identities_that_would_break_a_file_are_refused),
        cmocka_unit_test(names_of_other_directories_are_accepted),
        cmocka_unit_test_setup_teardown(links_are_followed_to_what_is_made, setup, teardown),
        cmocka_unit_test_setup_teardown(device_nodes_have_the_modes_of_udev, setup, teardown),
        cmocka_unit_test_setup_teardown(terminals_have_the_images_group_tty, setup, teardown),
        cmocka_unit_test_setup_teardown(a_batch_script_is_written_once_and_only_over_itself, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(a_steps_directory_has_slurms_name, setup, teardown),
        cmocka_unit_test_setup_teardown(a_steps_directory_is_removed_with_its_files, setup,
                                        teardown),
    };
    return cmocka_run_group_tests_name("agent's files", tests, NULL, NULL);
}
