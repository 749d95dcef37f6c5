/* SPDX-License-Identifier: Apache-2.0 */
/* The value of vhpc.verity=, and the parameters of the kernel's target. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "verity.h"

/* The root hash of the example in the kernel's verity.rst. */
#define HASH "4392712ba01368efdf14b05c76f9e4df0d53664630b5d48632ed17a137f39076"

static void takes_blocks_and_root_hash(void **state)
{
    struct verity v = {0};

    (void)state;
    assert_true(verity_parse(&v, "1:" HASH));
    assert_int_equal(v.blocks, 1);
    assert_string_equal(v.root_hash, HASH);
    assert_true(verity_parse(&v, "4294967296:" HASH));
    assert_int_equal(v.blocks, 4294967296ULL);
}

static void refuses_all_other_values(void **state)
{
    static const char *const wrong[] = {
        "",
        ":",
        "1",
        "1:",
        HASH,
        ":" HASH,
        "0:" HASH,
        "01:" HASH,
        "-1:" HASH,
        "+1:" HASH,
        "0x10:" HASH,
        "1k:" HASH,
        "4294967297:" HASH,
        "18446744073709551617:" HASH,
        "99999999999999999999999999999999:" HASH,
        "1:" HASH "0",
        "1:" HASH ":",
        "1:" HASH " ",
        "1::" HASH,
        "1:392712ba01368efdf14b05c76f9e4df0d53664630b5d48632ed17a137f39076",
        "1:G392712ba01368efdf14b05c76f9e4df0d53664630b5d48632ed17a137f39076",
        "1:A392712BA01368EFDF14B05C76F9E4DF0D53664630B5D48632ED17A137F39076",
    };

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct verity v = {0};

        if (verity_parse(&v, wrong[i]))
            fail_msg("%s was taken", wrong[i]);
        assert_int_equal(v.blocks, 0);
    }
}

/* version, device with data, device with tree, block sizes, blocks, first block of the tree,
 * algorithm, root hash, salt: the order of verity.rst */
static void the_table_is_that_of_the_kernels_manual(void **state)
{
    struct verity v = {.blocks = 262144, .root_hash = HASH};
    char table[256];

    (void)state;
    assert_true(verity_table(table, sizeof table, &v, "/dev/vda"));
    assert_string_equal(table, "1 /dev/vda /dev/vda 4096 4096 262144 262144 sha256 " HASH " -");
}

static void a_table_that_is_cut_is_none(void **state)
{
    struct verity v = {.blocks = 1, .root_hash = HASH};
    char table[256];
    const size_t whole = strlen("1 /dev/vda /dev/vda 4096 4096 1 1 sha256 " HASH " -") + 1;

    (void)state;
    assert_true(verity_table(table, whole, &v, "/dev/vda"));
    assert_false(verity_table(table, whole - 1, &v, "/dev/vda"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_blocks_and_root_hash),
        cmocka_unit_test(refuses_all_other_values),
        cmocka_unit_test(the_table_is_that_of_the_kernels_manual),
        cmocka_unit_test(a_table_that_is_cut_is_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
