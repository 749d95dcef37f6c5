# SPDX-License-Identifier: Apache-2.0
"""The operators' acceptance test: the same programs natively and in guests, on the same nodes.

Decides which tests there are, how large they are and how their output is parsed, how native and
guest figures are compared, and what a report contains.  ``run`` submits the jobs,
through ``slurm.userjobs``, with the rights of the user who calls it; everything
else is pure.  It may not print (except progress, through a callback), and does
not know vhpcd or the node library: guests are requested as every user does.
Called by ``cli.bench`` only.
"""
