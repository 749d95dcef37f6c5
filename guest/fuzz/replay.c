/* SPDX-License-Identifier: Apache-2.0 */
/* Without libFuzzer: run the target over the files named on the command line. */
#include <stdio.h>
#include <stdlib.h>

#include "rig.h"

int main(int argc, char **argv)
{
    static uint8_t data[1 << 20];
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rbe");
        if (f == NULL) {
            perror(argv[i]);
            return 1;
        }
        size_t size = fread(data, 1, sizeof data, f);
        (void)fclose(f);
        /*
         * A copy of the exact size, so that the sanitizer detects a read of the first byte after
         * it.
         */
        uint8_t *exact = malloc(size + 1);
        if (exact == NULL)
            return 1;
        for (size_t k = 0; k < size; k++)
            exact[k] = data[k];
        (void)LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    (void)printf("%d inputs\n", argc - 1);
    return argc > 1 ? 0 : 1;
}
