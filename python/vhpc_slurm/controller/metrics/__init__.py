# SPDX-License-Identifier: Apache-2.0
"""vhpcd's metrics for Prometheus: counts and times of requests, boots, leases, keys and the fabric.

``instruments`` counts what requests and answers show, ``state`` reads the rest when it is
asked, ``exposition`` answers over HTTP. Labels have few values: no job, node or user is
among them. Only ``exposition`` and ``instruments`` know prometheus_client, which a site
without metrics does not need.
"""
