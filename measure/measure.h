/* SPDX-License-Identifier: Apache-2.0 */
/* Shared code of the measuring programs: numbers from the command line, errors, time. */
#ifndef VHPC_MEASURE_H
#define VHPC_MEASURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum measure_exit {
    MEASURE_OK = 0,
    MEASURE_FAILED = 1,
    MEASURE_USAGE = 2,
    MEASURE_MISSING = 3, /* something that the test needs is not on this machine */
};

/* Read a decimal number from LOW to HIGH; false: print what is wrong with the argument NAME. */
bool measure_number(const char *name, const char *text, long low, long high, long *value);

/* Print one line to stderr, with the text of errno if ERROR is not 0. */
__attribute__((format(printf, 2, 3))) void measure_complain(int error, const char *format, ...);

/* Seconds of the monotonic clock. */
double measure_now(void);

/* Fill a buffer with a pattern that depends on SEED, and check it: index of the first difference,
 * or SIZE. */
void measure_fill(unsigned char *data, size_t size, uint32_t seed);
size_t measure_check(const unsigned char *data, size_t size, uint32_t seed);

#endif
