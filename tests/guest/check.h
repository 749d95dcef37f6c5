/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka, and the headers that it needs before it. */
#ifndef CHECK_H
#define CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
