/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "options.h"
#include "text.h"

static struct vhpc_values values;
static char why[VHPC_WHY_SIZE];

static int forget(void **unused)
{
    (void)unused;
    memset(&values, 0, sizeof values);
    why[0] = '\0';
    return 0;
}

static bool set(enum vhpc_option_id id, const char *text)
{
    return vhpc_values_set(&values, id, "--option", text, why, sizeof why);
}

static void becomes(enum vhpc_option_id id, const char *text, const char *expected)
{
    assert_true(set(id, text));
    assert_true(values.set[id]);
    assert_string_equal(values.text[id], expected);
}

static void is_refused(enum vhpc_option_id id, const char *text)
{
    forget(NULL);
    assert_false(set(id, text));
    assert_false(values.set[id]);
    assert_true(strncmp(why, "--option=", 9) == 0);
    assert_true(vhpc_text_is_plain(why, strlen(why)));
}

static void an_image_without_tag_is_the_latest(void **unused)
{
    (void)unused;
    becomes(VHPC_IMAGE, "debian-minimal", "debian-minimal:latest");
    becomes(VHPC_IMAGE, "a", "a:latest");
    becomes(VHPC_IMAGE, "rocky9.4_hpc:2024-B", "rocky9.4_hpc:2024-B");
    becomes(VHPC_IMAGE, "a:_x", "a:_x");
}

static void an_image_is_nothing_a_shell_or_a_path_would_mind(void **unused)
{
    static const char *const bad[] = {
        "",      ":",   ":latest",  "a:",         "Debian", "-a",   ".a",  "a/b",
        "../a",  "a b", "a\nb",     "a:b:c",      "a:-b",   "a:.b", "a;b", "a$b",
        "a:b\n", "a\n", "\xc3\xa4", "a:\xc3\xa4", "a:b/c",  "-",
    };

    (void)unused;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_IMAGE, bad[i]);
}

#define DIGEST "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static void an_image_may_be_pinned_by_its_digest(void **unused)
{
    static const char *const bad[] = {
        "a@",
        "a@sha256:",
        "a@sha256:0123",
        "@" DIGEST,
        "a@" DIGEST "0",
        "a:@" DIGEST,
        "a@" DIGEST ":b",
        "a@@" DIGEST,
        "a@" DIGEST "@" DIGEST,
        "a@" DIGEST "\n",
        "a@sha512:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "a@sha256:0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef",
        "a@sha256:../../../../../../../../../../../../../../../../../../../etc/shadow",
    };

    (void)unused;
    becomes(VHPC_IMAGE, "a@" DIGEST, "a:latest@" DIGEST);
    becomes(VHPC_IMAGE, "a:12@" DIGEST, "a:12@" DIGEST);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_IMAGE, bad[i]);
}

static void an_image_may_be_in_the_users_own_catalogue(void **unused)
{
    static const char *const bad[] = {"own/",  "own/:1",  "own/own/a", "own//a", "own/../a",
                                      "Own/a", "own/a/b", "/a",        "alice/a"};

    (void)unused;
    becomes(VHPC_IMAGE, "own/a", "own/a:latest");
    becomes(VHPC_IMAGE, "own/a:1@" DIGEST, "own/a:1@" DIGEST);
    becomes(VHPC_IMAGE, "own", "own:latest");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_IMAGE, bad[i]);
}

static void name_and_tag_have_at_most_64_characters(void **unused)
{
    char text[160];

    (void)unused;
    memset(text, 'a', sizeof text);
    text[64] = ':';
    text[129] = '\0';
    becomes(VHPC_IMAGE, text, text);
    text[129] = 'a';
    text[130] = '\0';
    is_refused(VHPC_IMAGE, text);
    memset(text, 'a', 65);
    text[65] = '\0';
    is_refused(VHPC_IMAGE, text);
}

static void a_size_without_suffix_is_mib_as_for_slurms_mem(void **unused)
{
    (void)unused;
    becomes(VHPC_MEM_RESERVE, "512", "512");
    becomes(VHPC_MEM_RESERVE, "512M", "512");
    becomes(VHPC_MEM_RESERVE, "2G", "2048");
    becomes(VHPC_MEM_RESERVE, "2g", "2048");
    becomes(VHPC_MEM_RESERVE, "1T", "1048576");
    becomes(VHPC_MEM_RESERVE, "16T", "16777216");
}

static void parts_of_a_mib_are_rounded_up(void **unused)
{
    (void)unused;
    becomes(VHPC_MEM_RESERVE, "1K", "1");
    becomes(VHPC_MEM_RESERVE, "1024K", "1");
    becomes(VHPC_MEM_RESERVE, "1025K", "2");
}

static void other_sizes_are_refused(void **unused)
{
    static const char *const bad[] = {"",   "0",    "0K",  "G",        "1.5G",
                                      "-1", "+1",   " 1",  "1 ",       "1GB",
                                      "1P", "0x10", "17T", "16777217", "99999999999999999999",
                                      "1\n"};

    (void)unused;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_MEM_RESERVE, bad[i]);
}

static void a_disk_has_at_least_64_mib(void **unused)
{
    static const char *const bad[] = {"", "0", "63", "64512K", "1K", "G", "1.5G", "-1", "17T"};

    (void)unused;
    becomes(VHPC_DISK, "64", "64");
    becomes(VHPC_DISK, "64513K", "64");
    becomes(VHPC_DISK, "20G", "20480");
    becomes(VHPC_DISK, "16T", "16777216");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_DISK, bad[i]);
}

static void a_disk_may_have_a_mount_point(void **unused)
{
    char longest[3 + VHPC_MOUNT_POINT_MAX + 1] = "64:/";

    (void)unused;
    becomes(VHPC_DISK, "20G:/scratch", "20480:/scratch");
    becomes(VHPC_DISK, "64:/tmp", "64:/tmp");
    becomes(VHPC_DISK, "64:/var/tmp", "64:/var/tmp");
    becomes(VHPC_DISK, "64:/var/lib/docker", "64:/var/lib/docker");
    becomes(VHPC_DISK, "64:/homes/.a_b+c-d/E9", "64:/homes/.a_b+c-d/E9");
    becomes(VHPC_DISK, "64:/...", "64:/...");
    memset(longest + 4, 'x', VHPC_MOUNT_POINT_MAX - 1);
    becomes(VHPC_DISK, longest, longest);
}

static void other_mount_points_are_refused(void **unused)
{
    static const char *const bad[] = {
        "64:",           "64:scratch",     "64:/",         "64://",         "64:/a/",
        "64:/a//b",      "64:/.",          "64:/..",       "64:/a/./b",     "64:/a/../b",
        "64:/a/..",      "64:/a b",        "64:/a,b",      "64:/a:b",       "64:/a\n",
        "64:/a\x1b[1m",  "64:/\xc3\xa4",   "64:/a\\b",     "64:/a\"b",      "64:/a%j",
        "64:/a*",        "64:/$HOME",      ":/scratch",    "/scratch",      "63:/scratch",
        "1.5G:/scratch", "17T:/scratch",   "64 :/scratch", "64: /scratch",  "64:64:/scratch",
        "64:/proc",      "64:/proc/1",     "64:/sys",      "64:/dev/shm",   "64:/run",
        "64:/run/vhpc",  "64:/etc",        "64:/etc/a",    "64:/usr/local", "64:/boot",
        "64:/home",      "64:/home/alice", "64:/lib64/a",  "64:/bin",       "64:/sbin",
        "64:/var",       "64:/var/lib",    "64:/lib",      "64:/lib32",     "64:/libx32/a",
    };
    char too_long[3 + VHPC_MOUNT_POINT_MAX + 2] = "64:/";

    (void)unused;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_DISK, bad[i]);
    memset(too_long + 4, 'x', VHPC_MOUNT_POINT_MAX);
    is_refused(VHPC_DISK, too_long);
}

static void a_saved_image_is_in_the_users_own_catalogue(void **unused)
{
    static const char *const bad[] = {
        "", "own/", "debian", "debian:12", "own/../a", "own/a b", "own/A", "x/a", "dir:/own/a",
    };

    (void)unused;
    becomes(VHPC_RESUME, "Run-7_b.2", "Run-7_b.2");
    is_refused(VHPC_RESUME, "");
    is_refused(VHPC_RESUME, ".a");
    is_refused(VHPC_RESUME, "a/b");
    is_refused(VHPC_RESUME, "0123456789012345678901234567890123456789012345678901234567890123x");
    becomes(VHPC_IMAGE, "checkpoint://Run-7", "checkpoint://Run-7");
    is_refused(VHPC_SAVE, "checkpoint://Run-7");
    becomes(VHPC_SAVE, "own/tools", "own/tools:latest");
    becomes(VHPC_SAVE, "own/tools:v2", "own/tools:v2");
    is_refused(VHPC_SAVE, "own/a@" DIGEST);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is_refused(VHPC_SAVE, bad[i]);
}

static void batch_is_guest_or_host(void **unused)
{
    (void)unused;
    becomes(VHPC_BATCH, "guest", "guest");
    becomes(VHPC_BATCH, "host", "host");
    is_refused(VHPC_BATCH, "");
    is_refused(VHPC_BATCH, "Host");
    is_refused(VHPC_BATCH, "host ");
}

static void a_timeout_is_1_to_3600_seconds(void **unused)
{
    (void)unused;
    becomes(VHPC_TIMEOUT, "1", "1");
    becomes(VHPC_TIMEOUT, "0090", "90");
    becomes(VHPC_TIMEOUT, "3600", "3600");
    is_refused(VHPC_TIMEOUT, "");
    is_refused(VHPC_TIMEOUT, "0");
    is_refused(VHPC_TIMEOUT, "3601");
    is_refused(VHPC_TIMEOUT, "1m");
    is_refused(VHPC_TIMEOUT, "-5");
    is_refused(VHPC_TIMEOUT, "18446744073709551617");
}

static void virtual_functions_are_0_to_256(void **unused)
{
    (void)unused;
    becomes(VHPC_VFS, "0", "0");
    becomes(VHPC_VFS, "08", "8");
    becomes(VHPC_VFS, "256", "256");
    is_refused(VHPC_VFS, "");
    is_refused(VHPC_VFS, "257");
    is_refused(VHPC_VFS, "-1");
    is_refused(VHPC_VFS, "2 ");
    is_refused(VHPC_VFS, "all");
    becomes(VHPC_GUESTS_PER_NODE, "1", "1");
    becomes(VHPC_GUESTS_PER_NODE, "064", "64");
    is_refused(VHPC_GUESTS_PER_NODE, "0");
    is_refused(VHPC_GUESTS_PER_NODE, "65");
    is_refused(VHPC_GUESTS_PER_NODE, "");
    is_refused(VHPC_GUESTS_PER_NODE, "two");
    becomes(VHPC_NETWORK, "job", "job");
    becomes(VHPC_NETWORK, "none", "none");
    becomes(VHPC_NETWORK, "nat", "nat");
    becomes(VHPC_NETWORK, "job,nat", "job,nat");
    becomes(VHPC_NETWORK, "nat,job", "job,nat");
    becomes(VHPC_NETWORK, "job,multicast", "job,multicast");
    becomes(VHPC_NETWORK, "multicast,nat,job", "job,multicast,nat");
    becomes(VHPC_NETWORK, "site", "site");
    becomes(VHPC_NETWORK, "site,job", "job,site");
    becomes(VHPC_NETWORK, "site,multicast,job", "job,multicast,site");
    is_refused(VHPC_NETWORK, "site,nat");
    is_refused(VHPC_NETWORK, "job,nat,site");
    is_refused(VHPC_NETWORK, "multicast");
    is_refused(VHPC_NETWORK, "multicast,nat");
    is_refused(VHPC_NETWORK, "job,multicast,job");
    is_refused(VHPC_NETWORK, "jo");
    is_refused(VHPC_NETWORK, "jobs");
    is_refused(VHPC_NETWORK, ",job");
    is_refused(VHPC_NETWORK, "job,none");
    is_refused(VHPC_NETWORK, "nat,nat");
    is_refused(VHPC_NETWORK, "none,nat");
    is_refused(VHPC_NETWORK, "nat,");
    is_refused(VHPC_NETWORK, "Job");
    is_refused(VHPC_NETWORK, "");
}

static void a_console_path_is_plain_text(void **unused)
{
    (void)unused;
    becomes(VHPC_CONSOLE, "/scratch/alice/console-%j.log", "/scratch/alice/console-%j.log");
    becomes(VHPC_CONSOLE, "with blank.log", "with blank.log");
    becomes(VHPC_CONSOLE,
            "Stra\xc3\x9f"
            "e/\xe2\x82\xac.log",
            "Stra\xc3\x9f"
            "e/\xe2\x82\xac.log");
    is_refused(VHPC_CONSOLE, "");
    is_refused(VHPC_CONSOLE, "dir/");
    is_refused(VHPC_CONSOLE, "a\nb");
    is_refused(VHPC_CONSOLE, "a\x1b[2J");
    is_refused(VHPC_CONSOLE, "a\x7f");
    is_refused(VHPC_CONSOLE, "a\xc2\x9b");     /* C1: a terminal reads it as ESC [ */
    is_refused(VHPC_CONSOLE, "a\xff");         /* not UTF-8 */
    is_refused(VHPC_CONSOLE, "a\xc0\xaf");     /* overlong '/' */
    is_refused(VHPC_CONSOLE, "a\xed\xa0\x80"); /* a surrogate */
    is_refused(VHPC_CONSOLE, "a\xe2\x80\xa8"); /* line separator */
    is_refused(VHPC_CONSOLE, "a\xe2\x82");     /* cut short */
}

static void a_console_path_has_at_most_1024_bytes(void **unused)
{
    char text[1026];

    (void)unused;
    memset(text, 'x', sizeof text);
    text[1024] = '\0';
    becomes(VHPC_CONSOLE, text, text);
    text[1024] = 'x';
    text[1025] = '\0';
    is_refused(VHPC_CONSOLE, text);
}

static void a_refused_value_is_shown_without_harm_to_the_terminal(void **unused)
{
    char longest[4096];

    (void)unused;
    is_refused(VHPC_IMAGE, "\x1b]0;owned\x07");
    assert_non_null(strstr(why, "--option=?]0;owned?: "));
    memset(longest, 'A', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    is_refused(VHPC_IMAGE, longest);
    assert_non_null(strstr(why, "AAA...: "));
    assert_true(strlen(why) < sizeof why - 1);
}

static void a_refused_value_leaves_the_one_before(void **unused)
{
    (void)unused;
    becomes(VHPC_TIMEOUT, "60", "60");
    assert_false(set(VHPC_TIMEOUT, "x"));
    assert_true(values.set[VHPC_TIMEOUT]);
    assert_string_equal(values.text[VHPC_TIMEOUT], "60");
}

/* Slurm names the option --vhpc-x; the variable has the same name in upper case. */
static void each_variable_is_the_option_in_capitals(void **unused)
{
    (void)unused;
    for (size_t id = 0; id < VHPC_OPTION_COUNT; id++) {
        const char *name = vhpc_options[id].name;
        const char *variable = vhpc_options[id].variable;

        assert_int_equal(strlen(name), strlen(variable));
        for (size_t i = 0; name[i] != '\0'; i++)
            assert_int_equal(name[i] == '-' ? '_' : name[i] - 'a' + 'A', variable[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(an_image_without_tag_is_the_latest, forget),
        cmocka_unit_test_setup(an_image_is_nothing_a_shell_or_a_path_would_mind, forget),
        cmocka_unit_test_setup(an_image_may_be_in_the_users_own_catalogue, forget),
        cmocka_unit_test_setup(an_image_may_be_pinned_by_its_digest, forget),
        cmocka_unit_test_setup(name_and_tag_have_at_most_64_characters, forget),
        cmocka_unit_test_setup(a_size_without_suffix_is_mib_as_for_slurms_mem, forget),
        cmocka_unit_test_setup(parts_of_a_mib_are_rounded_up, forget),
        cmocka_unit_test_setup(other_sizes_are_refused, forget),
        cmocka_unit_test_setup(a_disk_has_at_least_64_mib, forget),
        cmocka_unit_test_setup(a_disk_may_have_a_mount_point, forget),
        cmocka_unit_test_setup(other_mount_points_are_refused, forget),
        cmocka_unit_test_setup(a_saved_image_is_in_the_users_own_catalogue, forget),
        cmocka_unit_test_setup(batch_is_guest_or_host, forget),
        cmocka_unit_test_setup(a_timeout_is_1_to_3600_seconds, forget),
        cmocka_unit_test_setup(virtual_functions_are_0_to_256, forget),
        cmocka_unit_test_setup(a_console_path_is_plain_text, forget),
        cmocka_unit_test_setup(a_console_path_has_at_most_1024_bytes, forget),
        cmocka_unit_test_setup(a_refused_value_is_shown_without_harm_to_the_terminal, forget),
        cmocka_unit_test_setup(a_refused_value_leaves_the_one_before, forget),
        cmocka_unit_test_setup(each_variable_is_the_option_in_capitals, forget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
