/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VHPC_LOCKS_SANDBOX_H
#define VHPC_LOCKS_SANDBOX_H

#include "serve.h"

/*
 * Let this process open no files but those of its shares from now on, and execute none
 * (landlock(7)). 0 or -errno; -ENOSYS or -EOPNOTSUPP: this kernel cannot, and the rights of the
 * user are the limit.
 */
int sandbox_enter(const struct locks_server *s);

#endif
