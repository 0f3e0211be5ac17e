"""The filesystem: what ``/ctx`` looks like, over ``runtime``.

Its floors, from below: the ground (errnos, locks, disks, caches), ``tree`` (the parts of the
tree), ``tools``, ``files`` (the rows), and the roof (the daemon, the mount, requests). A module
imports from its own floor and from lower ones; ``runtime`` imports nothing of this package. Only
this package knows pyfuse3 and errnos.
"""
