/* SPDX-License-Identifier: Apache-2.0 */
/* The environment operation: variables of the user, which win over those of the image. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agent.h"
#include "imageenv.h"

int environment_set(struct agent *a, const struct buf *list, char *text, size_t size)
{
    static struct image_env without_image;
    if (a->has_user_env)
        return 0;
    if (a->image_env == NULL)
        a->image_env = &without_image;
    int rc = image_env_add_list(a->image_env, (const char *)buf_head(list), list->len);
    a->has_user_env = rc == 0;
    if (rc < 0)
        (void)snprintf(text, size, "cannot set the variables of the user: %s",
                       rc == -EINVAL ? "each must be NAME=VALUE" : strerror(-rc));
    return rc;
}
