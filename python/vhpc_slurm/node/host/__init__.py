# SPDX-License-Identifier: Apache-2.0
"""The compute node itself, without any job: topology, PCI functions, processes, accounts, control groups.

Decides: how sysfs, procfs and the account database are read, and what confines a process that is started.
May not: use a generation's journal or libvirt.  The lowest package in ``node``; all others call it.
"""
