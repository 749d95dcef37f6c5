/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The environment files of an image, with any bytes: what is taken can be set, and set again. The
 * first byte chooses the file.
 */
#include <stdlib.h>
#include <string.h>

#include "imageenv.h"
#include "rig.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct image_env e = {0};
    struct execspec spec = {0};
    image_env_add *add = size > 0 && data[0] % 2 == 0 ? image_env_add_list : image_env_add_lines;
    if (add(&e, (const char *)data + (size > 0), size - (size > 0)) < 0) {
        image_env_free(&e);
        return 0;
    }
    if (execspec_add_env(&spec, "PATH=/host") < 0 || image_env_apply(&e, &spec) < 0)
        abort();
    size_t count = spec.envc;
    for (size_t i = 0; i < count; i++)
        if (strchr(spec.envp[i], '=') == NULL)
            abort();
    if (image_env_apply(&e, &spec) < 0 || spec.envc != count)
        abort();
    execspec_free(&spec);
    image_env_free(&e);
    return 0;
}
