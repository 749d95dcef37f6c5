/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka and what it needs before it, once. */
#ifndef CHECK_H
#define CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
