# SPDX-License-Identifier: Apache-2.0
"""vhpcd: leases of generations, and how hooks ask for them.

It decides what a generation holds: image digest, allocation, network identity. It
may not touch a compute node. Its layers, from the top; imports go down only:

- ``server``: the process; ``client``: what hooks and the CLI call.
- ``api``: connections, authority, requests.
- ``leases``: state of leases and keys, one transition function.
- ``sync``: batches and audits of the fabric; ``store``: the database.
- ``wire_types``: leases as JSON, for the API and for the database.
"""
