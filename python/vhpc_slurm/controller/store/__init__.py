# SPDX-License-Identifier: Apache-2.0
"""The database of vhpcd: an SQLite file or a MariaDB server, one writer thread, every commit synchronous.

It stores leases and key assignments and decides nothing about them: it refuses
two owners of one key, and changes outside a transaction. ``controller.leases``
is its only writer; ``vhpc fabric`` reads keys from it without vhpcd.
"""
