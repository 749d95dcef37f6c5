/* SPDX-License-Identifier: Apache-2.0 */
/* promise: checkpoint.pmi */
/* The namespace of a step in messages of PMIx, and which programs are known. */
#include <string.h>

#include "check.h"
#include "pmixbytes.h"
#include "pmixmessage.h"

#define OLD "slurm.pmix.1009.2"
#define LONGER "slurm.pmix.1009.10"

struct bytes {
    const char *data;
    size_t len;
};

#define BYTES(text) ((struct bytes){(text), sizeof(text) - 1})

static void becomes(struct bytes before, enum pmix_place place, const char *own, const char *other,
                    struct bytes after)
{
    struct buf out = {0};
    assert_int_equal(buf_append(&out, "before", 6), 0);
    const uint8_t *data = (const uint8_t *)before.data;
    assert_int_equal(pmix_first(data, before.len, place == PMIX_IN_GREETING), before.len);
    assert_int_equal(pmix_rename(data, before.len, place, own, other, &out), 0);
    buf_consume(&out, 6);
    assert_int_equal(out.len, after.len);
    assert_memory_equal(buf_head(&out), after.data, after.len);
    buf_free(&out);
}

static void both_ways(struct bytes old, struct bytes longer, enum pmix_place place)
{
    becomes(old, place, OLD, LONGER, longer);
    becomes(longer, place, LONGER, OLD, old);
    becomes(old, place, "slurm.pmix.1009.1", LONGER, old);
}

static void names_may_become_longer(void **state)
{
    (void)state;
    both_ways(BYTES(GREETING("<", OLD)), BYTES(GREETING("=", LONGER)), PMIX_IN_GREETING);
    both_ways(BYTES(FENCE("\x1f", "$" OLD)), BYTES(FENCE("\x20", "&" LONGER)), PMIX_IN_CONTENT);
    both_ways(BYTES(GET("\x28", "$" OLD)), BYTES(GET("\x29", "&" LONGER)), PMIX_IN_CONTENT);
    both_ways(BYTES(GOT("\x49", "\x45", "$" OLD)), BYTES(GOT("\x4a", "\x46", "&" LONGER)),
              PMIX_IN_OBJECTS);
}

/* 127 bytes are the most that a length of one byte has. */
static void the_length_of_an_object_may_become_longer(void **state)
{
    (void)state;
#define SIXTY "012345678901234567890123456789012345678901234567890123456789"
#define REST SIXTY "01234567890123456789012345678901234567890123456"
    both_ways(BYTES(HEADER("\x70", "\x83") "\2\0\2\x7f\2$" OLD "\0" REST),
              BYTES(HEADER("\x70", "\x85") "\2\0\2\x80\1\2&" LONGER "\0" REST), PMIX_IN_OBJECTS);
}

static void several_names_and_objects_are_changed(void **state)
{
    (void)state;
    both_ways(BYTES(HEADER("\x70", "\x2e") "\2\0\2\x14\2$" OLD "\0"
                                           "\2\x14\2$" OLD "\0"),
              BYTES(HEADER("\x70", "\x30") "\2\0\2\x15\2&" LONGER "\0"
                                           "\2\x15\2&" LONGER "\0"),
              PMIX_IN_OBJECTS);
    both_ways(BYTES(HEADER("\x70", "\x28") "\2\x0c"
                                           "$" OLD "\0"
                                           "$" OLD "\0"),
              BYTES(HEADER("\x70", "\x2a") "\2\x0c"
                                           "&" LONGER "\0"
                                           "&" LONGER "\0"),
              PMIX_IN_CONTENT);
}

static void texts_that_only_contain_a_name_stay(void **state)
{
    (void)state;
    struct bytes longer = BYTES(HEADER("\x70", "\x18") "\2\x0c\2&" OLD ".x\0");
    becomes(longer, PMIX_IN_CONTENT, OLD, LONGER, longer);
    struct bytes error = BYTES(HEADER("\x70", "\2") "\2\x5b");
    becomes(error, PMIX_IN_OBJECTS, OLD, LONGER, error);
    struct bytes cut = BYTES(HEADER("\x70", "\6") "\2\0\2\x45\2$");
    becomes(cut, PMIX_IN_OBJECTS, OLD, LONGER, cut);
}

static void only_some_programs_are_known(void **state)
{
    (void)state;
#define IS(text) pmix_knows((const uint8_t *)(text), sizeof(text) - 1)
#define SAYS(security, kind, encoding, type, store)                                                \
    NOBODY "<\0\0\0\0\0\0\0" security "\0"                                                         \
           "\0\0\0\0" kind OLD "\0"                                                                \
           "\0\0\0\0"                                                                              \
           "5\0" encoding "\0" type store "\0"
    assert_true(IS(GREETING("<", OLD)));
    assert_true(IS(SAYS("native", "\0", "v4", "\1", "hash")));
    assert_false(IS(SAYS("munge", "\0", "v4", "\1", "hash")));
    assert_false(IS(SAYS("native", "\1", "v4", "\1", "hash")));
    assert_false(IS(SAYS("native", "\0", "v3", "\1", "hash")));
    assert_false(IS(SAYS("native", "\0", "v4", "\2", "hash")));
    assert_false(IS(SAYS("native", "\0", "v4", "\1", "shmem2")));
    for (size_t len = 0; len < sizeof GREETING("<", OLD) - 1; len++)
        assert_false(pmix_knows((const uint8_t *)GREETING("<", OLD), len));
}

static void messages_have_a_bound(void **state)
{
    (void)state;
    static const uint8_t whole[] = FINALIZE, huge[] = "\0\0\0\0\0\0\0\0\1\0\0\1\0\0\0\0";
    for (size_t len = 0; len < sizeof whole - 1; len++)
        assert_int_equal(pmix_first(whole, len, false), 0);
    assert_int_equal(pmix_first(whole, sizeof whole, false), sizeof whole - 1);
    assert_int_equal(pmix_first(huge, PMIX_HEADER, false), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_may_become_longer),
        cmocka_unit_test(the_length_of_an_object_may_become_longer),
        cmocka_unit_test(several_names_and_objects_are_changed),
        cmocka_unit_test(texts_that_only_contain_a_name_stay),
        cmocka_unit_test(only_some_programs_are_known),
        cmocka_unit_test(messages_have_a_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
