# SPDX-License-Identifier: Apache-2.0
"""The network partition of a job: which key and GUIDs a generation has, and backends that configure fabrics.

It decides which key is free (``keys``), what a fabric is told (``partitions``, the
backends behind ``backend.NetworkBackend``) and whether ports carry it (``readback``).
It keeps no state of jobs: the controller passes all key assignments in each call. It
may not touch the devices of a node. ``controller.sync`` calls backends in the fabric
thread; ``vhpc fabric`` and ``vhpc doctor`` read with the same modules.
"""
