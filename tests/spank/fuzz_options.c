/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Option values.  The first byte chooses the option, the rest is the user's text.  An accepted
 * value must be plain, bounded, and accepted again without a change: srun compares the canonical
 * form of a step's option with the job's.
 */
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "multi_prog.h"
#include "options.h"
#include "text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void check_option(enum vhpc_option_id id, const char *text)
{
    static struct vhpc_values first;
    static struct vhpc_values second;
    char why[VHPC_WHY_SIZE] = "";
    size_t length;

    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    if (!vhpc_values_set(&first, id, "--option", text, why, sizeof why)) {
        must(why[0] != '\0' && !first.set[id]);
        must(vhpc_text_is_plain(why, strlen(why)) || strlen(why) == sizeof why - 1);
        return;
    }
    length = strlen(first.text[id]);
    must(first.set[id] && length > 0 && length < VHPC_VALUE_SIZE);
    must(vhpc_text_is_plain(first.text[id], length));
    must(vhpc_values_set(&second, id, "--option", first.text[id], why, sizeof why));
    must(strcmp(first.text[id], second.text[id]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct vhpc_args args;
    char shown[VHPC_SHOWN_SIZE];
    char *text;
    char *words[1];

    if (size == 0)
        return 0;
    text = malloc(size);
    if (text == NULL)
        return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    check_option((enum vhpc_option_id)(data[0] % VHPC_OPTION_COUNT), text);
    (void)vhpc_argv_is_multi_prog(text);
    vhpc_text_shown(text, shown, sizeof shown);
    must(strlen(shown) < sizeof shown && vhpc_text_is_plain(shown, strlen(shown)));
    words[0] = text;
    must(vhpc_args_read(&args, 1, words) == (args.wrong[0] == '\0'));
    must(args.run_dir[0] == '/' && args.libexec[0] == '/');
    free(text);
    return 0;
}
