/* SPDX-License-Identifier: Apache-2.0 */
/* options_parse: the vhpc.* parameters of the kernel command line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "options.h"

static void parses_the_command_line_of_a_domain(void **state)
{
    struct init_options o;
    char error[512];

    (void)state;
    assert_int_equal(
        options_parse(
            &o,
            "no_timer_check console=ttyS0 panic=-1 quiet vhpc.root=/dev/vda "
            "vhpc.rootfstype=ext4 vhpc.init=/sbin/init vhpc.overlay_size=1g vhpc.rootwait=7 "
            "vhpc.disk=/dev/vdb vhpc.agent.disk=/dev/vdc "
            "vhpc.verity=21617:"
            "4392712ba01368efdf14b05c76f9e4df0d53664630b5d48632ed17a137f39076\n",
            error, sizeof error),
        0);
    assert_string_equal(o.root, "/dev/vda");
    assert_string_equal(o.rootfstype, "ext4");
    assert_string_equal(o.init, "/sbin/init");
    assert_string_equal(o.overlay_size, "1g");
    assert_string_equal(o.disk, "/dev/vdb");
    assert_string_equal(o.mounted_disk, "/dev/vdc");
    assert_int_equal(o.rootwait_s, 7);
    assert_int_equal(o.verity.blocks, 21617);
    assert_string_equal(o.verity.root_hash,
                        "4392712ba01368efdf14b05c76f9e4df0d53664630b5d48632ed17a137f39076");
}

static void has_defaults_for_all_but_the_root_device(void **state)
{
    struct init_options o;
    char error[512];

    (void)state;
    assert_int_equal(options_parse(&o, "vhpc.root=/dev/vdb", error, sizeof error), 0);
    assert_string_equal(o.root, "/dev/vdb");
    assert_string_equal(o.rootfstype, "erofs");
    assert_string_equal(o.init, "agent");
    assert_string_equal(o.overlay_size, "50%");
    assert_string_equal(o.disk, "");
    assert_string_equal(o.mounted_disk, "");
    assert_int_equal(o.rootwait_s, 30);
    assert_int_equal(o.verity.blocks, 0);
}

static void the_last_of_equal_words_counts(void **state)
{
    struct init_options o;
    char error[512];

    (void)state;
    assert_int_equal(
        options_parse(&o, "vhpc.root=/dev/vda vhpc.root=/dev/vdc", error, sizeof error), 0);
    assert_string_equal(o.root, "/dev/vdc");
}

static void refuses_with_the_word_named(void **state)
{
    static const struct {
        const char *cmdline, *expected;
    } cases[] = {
        {"quiet", "vhpc.root="},
        {"root=/dev/vda", "vhpc.root="},
        {"vhpc.root=", "vhpc.root="},
        {"vhpc.root", "vhpc.root"},
        {"vhpc.root=/dev/vda vhpc.rootfs=erofs", "vhpc.rootfs"},
        {"vhpc.root=/dev/vda vhpc.init=bash", "vhpc.init=bash"},
        {"vhpc.root=/dev/vda vhpc.rootwait=-1", "vhpc.rootwait=-1"},
        {"vhpc.root=/dev/vda vhpc.rootwait=9s", "vhpc.rootwait=9s"},
        {"vhpc.root=/dev/vda vhpc.verity=", "vhpc.verity="},
        {"vhpc.root=/dev/vda vhpc.verity", "vhpc.verity"},
        {"vhpc.root=/dev/vda vhpc.verity=off", "vhpc.verity=off"},
        {"vhpc.root=/dev/vda vhpc.rootwait=601", "vhpc.rootwait=601"},
        {"vhpc.root=/dev/vda vhpc.agent.disk=", "vhpc.agent.disk="},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct init_options o;
        char error[512] = "";

        assert_int_equal(options_parse(&o, cases[i].cmdline, error, sizeof error), -1);
        assert_non_null(strstr(error, cases[i].expected));
    }
}

static void refuses_a_value_that_does_not_fit(void **state)
{
    struct init_options o;
    char error[512], cmdline[OPTION_SIZE + 32] = "vhpc.root=";

    (void)state;
    memset(cmdline + strlen("vhpc.root="), 'x', OPTION_SIZE - 1);
    assert_int_equal(options_parse(&o, cmdline, error, sizeof error), 0);
    memset(cmdline + strlen("vhpc.root="), 'x', OPTION_SIZE);
    assert_int_equal(options_parse(&o, cmdline, error, sizeof error), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parses_the_command_line_of_a_domain),
        cmocka_unit_test(has_defaults_for_all_but_the_root_device),
        cmocka_unit_test(the_last_of_equal_words_counts),
        cmocka_unit_test(refuses_with_the_word_named),
        cmocka_unit_test(refuses_a_value_that_does_not_fit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
