# SPDX-License-Identifier: Apache-2.0
"""Leases and the keys that belong to them: every state, and every change from one state to another.

``transitions`` is the only code that computes a new state of a lease or of its
key assignment; ``lifecycle`` writes both in one transaction. The package decides
what a job gets, which nodes still hold a generation, and when it is released. It
may not read a socket or call a network backend. The API and the periodic tasks
of vhpcd call it, always in the database thread.
"""
