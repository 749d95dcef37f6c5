# SPDX-License-Identifier: Apache-2.0
"""Pure: a ``DomainSpec`` becomes libvirt domain XML, one concern at a time.

Decides nothing but the form: which elements libvirt is given for a guest whose plan is made.
May not: read a file, call libvirt.  ``node.boot`` and ``vhpc plan`` call it.

Each concern has a template, and a ``context`` function in the module of the
same name; those without logic share the one in ``plain``.  A context is a small
frozen value that holds everything its template prints; ``None`` leaves the
concern out.  Templates hold no logic beyond loops and presence.  Element names
and version requirements follow https://libvirt.org/formatdomain.html.
"""
