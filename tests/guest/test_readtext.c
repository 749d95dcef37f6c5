/* SPDX-License-Identifier: Apache-2.0 */
/* Text, words and numbers of the kernel's small files. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "readtext.h"
#include "textfile.h"

static void a_file_is_cut_and_ends_with_a_nul(void **state)
{
    (void)state;
    char name[] = "/tmp/vhpc-test-XXXXXX", text[5] = "####";
    int fd = mkstemp(name);
    assert_true(fd >= 0);
    (void)close(fd);
    assert_int_equal(read_text(name, text, sizeof text), 0);
    assert_string_equal(text, "");
    put_text(name, "ab\n");
    assert_int_equal(read_text(name, text, sizeof text), 3);
    assert_string_equal(text, "ab\n");
    put_text(name, "abcdefg");
    assert_int_equal(read_text(name, text, sizeof text), 4);
    assert_string_equal(text, "abcd");
    (void)unlink(name);
    assert_int_equal(read_text(name, text, sizeof text), -ENOENT);
    assert_string_equal(text, "");
    assert_int_equal(read_text("/tmp", text, sizeof text), -EISDIR);
}

static void a_line_is_read_word_by_word(void **state)
{
    (void)state;
    const char *at = "1: -> POSIX\t00:2d:77 0x10 9\nnext";
    char word[6];
    uint64_t number;
    assert_true(text_number(&at, 10, ':', &number) && number == 1);
    assert_true(text_word(&at, word, sizeof word));
    assert_string_equal(word, "->");
    assert_true(text_word(&at, word, 4)); /* cut, and read to its end */
    assert_string_equal(word, "POS");
    assert_true(text_number(&at, 16, ':', &number) && number == 0);
    assert_true(text_number(&at, 16, ':', &number) && number == 0x2d);
    assert_true(text_number(&at, 10, ' ', &number) && number == 77);
    assert_true(text_number(&at, 16, '\0', &number) && number == 16);
    assert_true(text_number(&at, 10, '\n', &number) && number == 9);
    assert_true(text_word(&at, word, sizeof word));
    assert_string_equal(word, "next");
    assert_false(text_word(&at, word, sizeof word));
    assert_false(text_number(&at, 10, '\0', &number));
}

static void what_is_no_number_is_left_as_it_is(void **state)
{
    (void)state;
    static const char *const odd[] = {"", "-1", "+1", "a", "\n1", "18446744073709551616", "7;"};
    uint64_t number = 5;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        const char *at = odd[i];
        assert_false(text_number(&at, 10, ' ', &number));
        assert_ptr_equal(at, odd[i]);
    }
    assert_int_equal(number, 5);
}

static void a_number_is_all_of_its_line(void **state)
{
    (void)state;
    uint64_t number;
    assert_true(text_is_number("104857600\nx", 10, UINT64_MAX, &number) && number == 104857600);
    assert_true(text_is_number("18446744073709551615", 10, UINT64_MAX, &number));
    assert_true(number == UINT64_MAX);
    assert_true(text_is_number("FFff", 16, 0xffff, &number) && number == 0xffff);
    assert_false(text_is_number("10000", 16, 0xffff, &number));
    assert_false(text_is_number("max\n", 10, UINT64_MAX, &number));
    assert_false(text_is_number("1 2\n", 10, UINT64_MAX, &number));
    assert_false(text_is_number(" 1", 10, UINT64_MAX, &number));
    assert_false(text_is_number("", 10, UINT64_MAX, &number));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_is_cut_and_ends_with_a_nul),
        cmocka_unit_test(a_line_is_read_word_by_word),
        cmocka_unit_test(what_is_no_number_is_left_as_it_is),
        cmocka_unit_test(a_number_is_all_of_its_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
