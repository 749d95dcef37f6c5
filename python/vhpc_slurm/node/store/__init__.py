# SPDX-License-Identifier: Apache-2.0
"""Files of a compute node: journals, images, timelines, reservations, locks, the outbox.

Decides: where each file of a job is (``layout``), and how it is written durably.
May not: start, stop or configure anything.  Uses ``host``; ``devices``, ``guest`` and the hooks call it.
"""
