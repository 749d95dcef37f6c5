# SPDX-License-Identifier: Apache-2.0
"""Verbs for one host: its hardware, its plan for a job, its checks, setup and repair."""
