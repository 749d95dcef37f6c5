/* SPDX-License-Identifier: Apache-2.0 */
/* Files of text in tests. */
#ifndef TEXTFILE_H
#define TEXTFILE_H

#include <stdio.h>

#include "check.h"

static inline void put_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static inline void expect_text(const char *path, const char *text)
{
    char got[1024] = "";
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    assert_true(fread(got, 1, sizeof got - 1, f) < sizeof got);
    assert_int_equal(fclose(f), 0);
    assert_string_equal(got, text);
}

#endif
