/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The submitting command imports a source */
#include "source.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "image.h"
#include "text.h"

void vhpc_source_list(const char *command, char *why, size_t size)
{
    char *const argv[] = {(char *)command, "image", "names", NULL};

    (void)execv(command, argv);
    snprintf(why, size, "couldn't list the images: %s: %s", command, strerror(errno));
}

bool vhpc_source_resolve(const char *command, const char *source, char image[VHPC_VALUE_SIZE],
                         char *why, size_t size)
{
    char *const argv[] = {(char *)command, "image", "resolve", "--", (char *)source, NULL};
    char shown[VHPC_SHOWN_SIZE];
    char answer[VHPC_VALUE_SIZE];
    const char *expected = NULL;
    enum vhpc_command_end end = vhpc_command_read(argv, answer, sizeof answer);
    int error = errno;

    vhpc_text_shown(source, shown, sizeof shown);
    if (end == VHPC_COMMAND_NOT_STARTED) {
        snprintf(why, size, "couldn't make an image of %s: %s: %s", shown, command,
                 strerror(error));
        return false;
    }
    if (end == VHPC_COMMAND_FAILED) {
        snprintf(why, size, "there is no image of %s, so no job was created (the reason is above)",
                 shown);
        return false;
    }
    if (end == VHPC_COMMAND_DONE)
        answer[strcspn(answer, "\n")] = '\0';
    if (end != VHPC_COMMAND_DONE || vhpc_is_source(answer) ||
        !vhpc_image_parse(answer, image, &expected) || strcmp(image, VHPC_IMAGE_LIST) == 0) {
        image[0] = '\0';
        snprintf(why, size, "couldn't read the name of the image of %s that %s printed", shown,
                 command);
        return false;
    }
    return true;
}
