# SPDX-License-Identifier: Apache-2.0
"""Verbs of users for their jobs: list, watch, reach and report them."""
