# SPDX-License-Identifier: Apache-2.0
"""The network of a job on its nodes: a bridge, a VXLAN device, a tap for each guest, and a firewall.

With ``network.encryption`` also a WireGuard interface (``tunnel``).

Decides: names, MAC and IP addresses (``plan``, pure); how the devices are made and removed (``segment``);
which packets are dropped (``firewall``); how guests of a cluster's other members are reached (``cluster``).
May not: choose a VNI or an address of a node (the lease has them), write the journal's entry
(``node.resource`` does, before ``segment.build``).  ``node.plan`` and ``node.resource`` call it.
"""
