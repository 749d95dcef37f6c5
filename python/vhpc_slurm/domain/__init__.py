# SPDX-License-Identifier: Apache-2.0
"""Pure: a ``DomainSpec`` becomes libvirt domain XML, one concern at a time.

Each concern is a module here with a ``context`` function and a template of the
same name.  A context is a small frozen value that holds everything its
template prints; ``None`` leaves the concern out.  Templates hold no logic
beyond loops and presence.  Element names and version requirements follow
https://libvirt.org/formatdomain.html.
"""
