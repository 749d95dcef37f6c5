/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool measure_number(const char *name, const char *text, long low, long high, long *value)
{
    char *end = NULL;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || number < low || number > high) {
        measure_complain(0, "%s is %s, not a number from %ld to %ld", name, text, low, high);
        return false;
    }
    *value = number;
    return true;
}

void measure_complain(int error, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (error != 0) {
        (void)fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, text, strerror(error));
    } else {
        (void)fprintf(stderr, "%s: %s\n", program_invocation_short_name, text);
    }
}

double measure_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void measure_fill(unsigned char *data, size_t size, uint32_t seed)
{
    for (size_t i = 0; i < size; i++) {
        data[i] = (unsigned char)((i * 131U + (i >> 8U) + seed) & 0xffU);
    }
}

size_t measure_check(const unsigned char *data, size_t size, uint32_t seed)
{
    for (size_t i = 0; i < size; i++) {
        if (data[i] != (unsigned char)((i * 131U + (i >> 8U) + seed) & 0xffU)) {
            return i;
        }
    }
    return size;
}
