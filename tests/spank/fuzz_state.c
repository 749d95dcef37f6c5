/*
 * Contents of a state file.  Root writes it; a torn or foreign file must still
 * be refused without harm, for the reader is about to become the user's task.
 */
#include <stdlib.h>
#include <string.h>

#include "state.h"
#include "text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void must_be_plain(const char *text)
{
    must(text != NULL && vhpc_text_is_plain(text, strlen(text)));
    must(strlen(text) <= VHPC_STATE_LINE_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct vhpc_state state;
    char why[VHPC_WHY_SIZE] = "";

    if (!vhpc_state_parse(&state, (const char *)data, size, why, sizeof why)) {
        must(why[0] != '\0' && state.bytes == NULL);
        return 0;
    }
    must(state.job != 0 && size <= VHPC_STATE_MAX);
    must_be_plain(state.generation);
    must_be_plain(state.image);
    must_be_plain(state.message);
    must_be_plain(state.commands);
    if (state.status == VHPC_READY)
        must(state.socket != NULL && state.socket[0] == '/' && strlen(state.socket) < 108);
    vhpc_state_free(&state);
    return 0;
}
