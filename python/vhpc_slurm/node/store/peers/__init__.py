# SPDX-License-Identifier: Apache-2.0
"""Peers: the nodes of a lease pass blobs of its image on, so that few of them read the catalogue.

``tree`` has the order of the nodes, ``wire`` the messages, ``offers`` what a node offers, ``server``
and ``process`` serve it, ``client`` asks for it. Nothing here is trusted: the receiver checks
chunks and blobs against the image's manifest (``store.part``).
"""
