# SPDX-License-Identifier: Apache-2.0
"""What a compute node keeps on disk: journals, images, timelines, reservations, locks, the outbox.

Decides: where each file of a job is (``layout``), and how it is written so that it survives a crash.
May not: start, stop or configure anything.  Stands on ``host``; ``devices``, ``guest`` and the hooks call it.
"""
