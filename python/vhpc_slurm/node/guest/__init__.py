# SPDX-License-Identifier: Apache-2.0
"""A running guest: libvirt, the helper processes beside QEMU, the channel to the agent, the console.

Decides: how one guest is started, reached and judged when it fails.
May not: choose the order of a boot (``node.boot``).  Stands on ``host``, ``store`` and ``devices``.
``libvirtd`` is the only module of the project that calls libvirt.
"""
