# SPDX-License-Identifier: Apache-2.0
"""PID 1 of the lab and of each of its hosts; standalone, imports nothing from vlab.

It reaps orphaned processes of its host and ends on SIGTERM.  When it has ended
for any reason, the kernel ends every other process of its pid namespace.

Command line: hostinit.py KIND NAME STATE.  vlab finds a running lab by these
arguments in /proc, never by a recorded pid.
"""

import os
import signal
import sys


def main() -> int:
    """Reap children until SIGTERM."""
    watched = {signal.SIGCHLD, signal.SIGTERM}
    # PID 1 gets only signals that it handles, so no mask is needed
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    while True:
        if signal.sigwait(watched) == signal.SIGTERM:
            return 0
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    sys.exit(main())
