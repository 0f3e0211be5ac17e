"""The binder makes sockets under names that nobody lists, and nobody else makes any."""

from __future__ import annotations

import stat
from types import SimpleNamespace
from typing import cast

import pyfuse3
import pytest

from runtime.sockets.server import DAEMON_BIND_NAME, bind_name
from tests.worlds.tree import CONTEXT, Mounted, complete, refused


def binder(mounted: Mounted) -> pyfuse3.RequestContext:
    pid, uid = mounted.base.runtime.binder.pid, mounted.agents.privilege.uid
    return cast(pyfuse3.RequestContext, SimpleNamespace(uid=uid, gid=0, pid=pid, umask=0))


def bound(
    mounted: Mounted, directory: str, name: str, ctx: pyfuse3.RequestContext | None = None
) -> int:
    mode = stat.S_IFSOCK | 0o600
    inode = mounted.inode(directory)
    made = complete(mounted.ops.mknod, inode, name.encode(), mode, 0, ctx or binder(mounted))
    return int(made.st_ino)


def test_what_the_binder_binds_is_the_socket_that_is_listed(mounted: Mounted) -> None:
    agent = mounted.make("x")
    assert bound(mounted, "", DAEMON_BIND_NAME) == mounted.inode("ctxd.sock")
    assert bound(mounted, "agent", bind_name(agent)) == mounted.inode("agent/x.sock")
    assert not [name for name in mounted.list("agent") if name.startswith(".bind")]


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("", ".bind-1"),
        ("", "ctxd.sock"),
        ("agent", DAEMON_BIND_NAME),
        ("agent", ".bind-4711"),
        ("agent", "x.sock"),
        ("agent/x.d", DAEMON_BIND_NAME),
        ("agent/x.d", ".bind-1"),
    ],
)
def test_the_binder_makes_nothing_else(mounted: Mounted, directory: str, name: str) -> None:
    mounted.make("x")
    with refused("EPERM"):
        bound(mounted, directory, name)


def test_nobody_else_lists_the_root_before_the_daemon_has_a_socket(mounted: Mounted) -> None:
    """He could hold the lock that a bind takes, and the daemon would not begin."""
    mounted.ops.beginning = True
    with refused("EAGAIN"):
        complete(mounted.ops.opendir, mounted.inode(""), CONTEXT)
    complete(mounted.ops.opendir, mounted.inode(""), binder(mounted))
    complete(mounted.ops.opendir, mounted.inode("agent"), CONTEXT)
    mounted.ops.beginning = False
    complete(mounted.ops.opendir, mounted.inode(""), CONTEXT)


def test_nobody_else_binds(mounted: Mounted) -> None:
    agent = mounted.make("x")
    for directory, name in (("", DAEMON_BIND_NAME), ("agent", bind_name(agent))):
        with refused("EPERM"):
            bound(mounted, directory, name, CONTEXT)
