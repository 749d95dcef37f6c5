# SPDX-License-Identifier: Apache-2.0
"""Files that a kernel boots with: ELF, modules, initramfs archives. Standard library only.

Used by the image builder, and by imports inside their sandbox.
"""
