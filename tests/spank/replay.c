/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a fuzz target on the files of directories, if the compiler has no fuzzer. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "re");
    size_t size;

    if (file == NULL) {
        perror(path);
        return -1;
    }
    size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    /* A copy of the exact size, so that AddressSanitizer detects reads after its end. */
    uint8_t *exact = malloc(size == 0 ? 1 : size);
    if (exact == NULL)
        return -1;
    for (size_t i = 0; i < size; i++)
        exact[i] = bytes[i];
    (void)LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 0;
}

int main(int argc, char *argv[])
{
    unsigned files = 0;

    for (int i = 1; i < argc; i++) {
        DIR *directory = opendir(argv[i]);
        struct dirent *entry;

        if (directory == NULL) {
            perror(argv[i]);
            return EXIT_FAILURE;
        }
        while ((entry = readdir(directory)) != NULL) {
            char path[4096];

            if (entry->d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (replay_file(path) != 0)
                return EXIT_FAILURE;
            files++;
        }
        closedir(directory);
    }
    printf("%u inputs\n", files);
    return files == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
