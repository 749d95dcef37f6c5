# SPDX-License-Identifier: Apache-2.0
"""Builds guest images from recipes.  Uses only the standard library, to run on any build host."""
