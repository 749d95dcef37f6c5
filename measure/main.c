/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-measure: the tests of `vhpc bench` that need no other program.
 *
 * Static, because the same file runs on nodes and in guests of any image.  Each line of output is a
 * name and a value. */
#include <stdio.h>
#include <string.h>

#include "files.h"
#include "machine.h"
#include "measure.h"
#include "triad.h"

static const char USAGE[] = "usage: vhpc-measure machine\n"
                            "       vhpc-measure triad MIB ROUNDS\n"
                            "       vhpc-measure files FOLDER MIB COUNT\n";

static int usage(void)
{
    (void)fputs(USAGE, stderr);
    return MEASURE_USAGE;
}

static int run(int argc, char **argv)
{
    long mib = 0;
    long count = 0;
    if (argc == 2 && strcmp(argv[1], "machine") == 0) {
        return machine();
    }
    if (argc == 4 && strcmp(argv[1], "triad") == 0) {
        if (!measure_number("MIB", argv[2], 1, 1 << 20, &mib) ||
            !measure_number("ROUNDS", argv[3], 1, 1000, &count)) {
            return MEASURE_USAGE;
        }
        return triad(mib, count);
    }
    if (argc == 5 && strcmp(argv[1], "files") == 0) {
        if (!measure_number("MIB", argv[3], 1, 1 << 20, &mib) ||
            !measure_number("COUNT", argv[4], 1, 1000000, &count)) {
            return MEASURE_USAGE;
        }
        return files(argv[2], mib, count);
    }
    return usage();
}

int main(int argc, char **argv)
{
    int status = run(argc, argv);
    if (fflush(stdout) != 0 && status == MEASURE_OK) {
        measure_complain(0, "cannot write the results");
        status = MEASURE_FAILED;
    }
    return status;
}
