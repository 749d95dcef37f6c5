# SPDX-License-Identifier: Apache-2.0
"""Import of containers and file trees as images; images in registries; comparison of images.

``imports`` is what others use: it puts an image in a catalogue; ``pull`` and ``push`` move images
between catalogues and registries, ``compare`` compares them. ``sandbox`` starts the
process that reads bytes of others and ``worker`` is that process; ``archives``, ``artifact``, ``erofs``,
``layers``, ``listing``, ``tree`` and ``rootfs`` are its parts and use the standard library only, so that
little else is in its reach. Nothing here runs on compute nodes.
"""
