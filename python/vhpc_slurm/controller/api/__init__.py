# SPDX-License-Identifier: Apache-2.0
"""The API of vhpcd: sockets, authentication, authority, and the request that each message carries.

It decides whose requests are answered and what each answer contains. It changes
leases only through ``controller.leases``, in the database thread, and it never
calls a network backend. ``controller.server`` starts it; ``controller.client`` is
its counterpart on nodes and on the command line.
"""
