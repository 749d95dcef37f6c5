# SPDX-License-Identifier: Apache-2.0
"""Verbs for the whole site: configuration, policy, the database of vhpcd."""
