# SPDX-License-Identifier: Apache-2.0
"""Times of processes that ask vhpcd as long as a job runs, in seconds."""

from __future__ import annotations

ASK_S = 25.0
"""vhpcd answers a question after so long, if it has nothing to say."""
PACE_S = 1.0
"""The shortest time between two questions, unless there were news."""
RETRY_S = 5.0
"""The pause after the node could not do what vhpcd said."""
