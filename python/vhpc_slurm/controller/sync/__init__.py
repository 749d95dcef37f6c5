# SPDX-License-Identifier: Apache-2.0
"""Fabric sync: brings the fabric to what the key assignments say, and audits that it stays there.

It decides when the fabric is changed (``scheduler``), in which order a batch is
applied, verified and made durable (``batch``), and what an audit concludes
(``audit``, ``isolation``). It knows key snapshots and generations, not leases:
what a batch proves goes to a ``BatchLedger`` that the caller supplies. Network
backends are called from here only.
"""
