# SPDX-License-Identifier: Apache-2.0
"""On a compute node: everything that a NodePlan becomes, and how it is taken apart again.

Nothing here knows the controller; hooks carry a Lease from one to the other.
"""
