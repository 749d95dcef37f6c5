/* SPDX-License-Identifier: Apache-2.0 */
/* Arbitrary bytes as a program that execve() did not run: what is found in it is a text of its own
 * bytes. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "interpreter.h"
#include "rig.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char name[64];
    int fd = memfd_create("program", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    if (interpreter_of(fd, name, sizeof name) != INTERPRETER_NONE) {
        size_t length = strnlen(name, sizeof name);
        if (length == sizeof name || (length > 0 && memmem(data, size, name, length) == NULL))
            abort();
    }
    (void)close(fd);
    return 0;
}
