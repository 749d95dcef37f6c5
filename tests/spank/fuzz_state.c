/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contents of a state file.  Root writes it; an incomplete or foreign file must be refused without
 * harm, because the reader is about to become the user's task.
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

/* If there are several guests, each has a socket, and none gets another one's GPUs. */
static void must_have_its_own(const struct vhpc_state *state, uint32_t guest)
{
    char socket[108];
    char gpus[VHPC_STATE_LINE_MAX + 1];

    must(vhpc_state_gpus(state, guest, gpus, sizeof gpus) && strchr(gpus, ',') == NULL);
    if (state->status == VHPC_READY && vhpc_state_socket(state, guest, socket, sizeof socket))
        must(socket[0] == '/');
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
    must_be_plain(state.command_path);
    if (state.status == VHPC_READY)
        must(state.socket != NULL && state.socket[0] == '/' && strlen(state.socket) < 108);
    must(state.guests >= 1 && state.guests <= 64);
    for (uint32_t guest = 0; guest < state.guests; guest++)
        must_have_its_own(&state, guest);
    for (uint32_t tasks = 1; tasks < 200; tasks += 7)
        must(vhpc_state_guest_of(&state, tasks - 1, tasks) < state.guests);
    vhpc_state_free(&state);
    return 0;
}
