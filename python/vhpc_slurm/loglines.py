# SPDX-License-Identifier: Apache-2.0
"""The form of log lines: texts of users, guests and nodes in them forge no line and control no terminal."""

from __future__ import annotations

import logging
from types import TracebackType

from vhpc_slurm.terminal import one_line, printable

CONTINUED = "  | "
"""In front of each line of a traceback, so that no text in it begins a line."""


class OneLine(logging.Formatter):
    """Writes each message as one line; a traceback follows, its lines marked."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The message as one line, in the format."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802 - logging's own name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """The traceback, printable."""
        return "\n".join(CONTINUED + printable(line) for line in super().formatException(ei).splitlines())


def to_stderr(form: str) -> None:
    """Send messages of this process, from INFO on, to stderr, each as one line."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
