# SPDX-License-Identifier: Apache-2.0
"""Import of containers and file trees as images.

``imports`` is what others use: it puts an image in a catalogue. ``sandbox`` starts the
process that reads the user's bytes and ``worker`` is that process; ``archives``, ``layers``,
``tree`` and ``rootfs`` are its parts and use the standard library only, so that little else
is in its reach. Nothing here runs on compute nodes.
"""
