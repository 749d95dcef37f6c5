# SPDX-License-Identifier: Apache-2.0
"""Builds guest images from recipes.  Standard library only: it runs on a bare build host."""
