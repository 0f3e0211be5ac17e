"""Operations on a directory, made at random: who does what to what.

Few names, slots and sizes, so that what one operation makes is what the next ones meet.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Any, Final

from hypothesis import strategies as st

from tests.posix.worker import At

#: a user, a verb of its worker, and the verb's arguments
Operation = tuple[int, str, tuple[Any, ...]]

_NAMES: Final = ("a", "b", "c", "d", "t")
_ODD: Final = (".", "", "a/", "d/", "d/.", "d/..", "a/b/c", "nothing/a", "x" * 255, "x" * 256,
               "with\nline", "\udcff", "..a")
_names: Final = st.sampled_from(_NAMES)
_paths: Final = st.one_of(_names, st.sampled_from([f"{d}/{n}" for d in "dtac" for n in "abcd"]),
                          _names, st.sampled_from(_ODD))
_slots: Final = st.integers(0, 2)
_at: Final[st.SearchStrategy[At]] = st.one_of(_paths, _slots)
_modes: Final = st.sampled_from((0o755, 0o644, 0o700, 0o600, 0o777, 0o666, 0o000, 0o444, 0o070,
                                 0o007, 0o1777, 0o111, 0o4755, 0o2755, 0o2777, 0o6711))
_sizes: Final = st.sampled_from((0, 1, 3, 10, 4095, 4096, 4097, 10_000, 200_000, 1 << 33))
_lengths: Final = st.sampled_from((0, 1, 3, 10, 4096, 5000, 140_000))
_data: Final = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(65, 90), _lengths)
_times: Final = st.one_of(st.sampled_from(("now", "omit")),
                          st.integers(0, 10**18 - 1), st.sampled_from((0, 1, 10**9 - 1)))
_attributes: Final = st.sampled_from(("user.a", "user.b", "user.", "user." + "n" * 251, "trusted.a",
                                      "security.a", "other.a", "none"))
_values: Final = st.sampled_from((b"", b"one", b"three", b"v" * 1000, b"v" * 70_000))
_acls: Final = st.sampled_from(("system.posix_acl_access", "system.posix_acl_default"))
#: version 2, and user::rw- group::r-- other::r--
_ACL: Final = bytes.fromhex("02000000" "01000600ffffffff" "04000400ffffffff" "20000400ffffffff")
_offsets: Final = st.integers(-1, 12)

_flags: Final = st.builds(
    lambda access, more: access | sum(more),
    st.sampled_from((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR)),
    st.sets(st.sampled_from((os.O_CREAT, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND,
                             os.O_NOFOLLOW, os.O_DIRECTORY, os.O_SYNC, os.O_NOATIME)), max_size=3),
)

#: RENAME_NOREPLACE 1, RENAME_EXCHANGE 2
_renames: Final = st.sampled_from((0, 0, 1, 2, 3))
_locks: Final = st.sampled_from((fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN))


def _verbs(ids: st.SearchStrategy[int]) -> dict[str, tuple[st.SearchStrategy[Any], ...]]:
    """The arguments of each verb."""
    follow = st.booleans()
    return {
        "open": (_slots, _paths, _flags, _modes),
        "close": (_slots,),
        "read": (_slots, _lengths),
        "write": (_slots, _data),
        "pread": (_slots, _lengths, _sizes),
        "pwrite": (_slots, _data, _sizes),
        "seek": (_slots, _offsets, st.sampled_from((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))),
        "holes": (_slots, _sizes, st.sampled_from((os.SEEK_DATA, os.SEEK_HOLE))),
        "truncate": (_at, _sizes),
        "fsync": (_slots,),
        "fdatasync": (_slots,),
        "fallocate": (_slots, st.sampled_from((0, 1, 3, 16)), _sizes, _sizes),
        "copy": (_slots, _slots, _lengths),
        "sendfile": (_slots, _slots, _sizes, _lengths),
        "map_write": (_slots, _sizes, _data),
        "map_read": (_slots, st.booleans()),
        "flock": (_slots, _locks),
        "lockf": (_slots, _locks, _offsets, st.sampled_from((0, 1, 10))),
        "getlk": (_slots, st.sampled_from((fcntl.F_RDLCK, fcntl.F_WRLCK))),
        "mkdir": (_paths, _modes),
        "rmdir": (_paths,),
        "unlink": (_paths,),
        "symlink": (st.one_of(_paths, st.sampled_from(("../a", "d/a", "t"))), _paths),
        "readlink": (_paths,),
        "link": (_paths, _paths, follow),
        "rename": (_paths, _paths, _renames),
        "mkfifo": (_paths, _modes),
        "mknod": (_paths, st.sampled_from((stat.S_IFREG, stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFCHR,
                                           stat.S_IFBLK, stat.S_IFDIR)), _modes),
        "bind": (_paths,),
        "connect": (_paths,),
        "list": (_at,),
        "stat": (_at,),
        "lstat": (_paths,),
        "access": (_paths, st.integers(0, 7)),
        "statfs": (_at,),
        "chmod": (_at, _modes),
        "chown": (_at, ids, ids),
        "lchown": (_paths, ids, ids),
        "utimes": (_at, _times, _times, follow),
        "touch": (_at, _times, _times),
        "setxattr": (_at, _attributes, _values, st.sampled_from((0, os.XATTR_CREATE,
                                                                 os.XATTR_REPLACE))),
        "getxattr": (_at, st.one_of(_attributes, _acls)),
        "listxattr": (_at,),
        "removexattr": (_at, st.one_of(_attributes, _acls)),
        "umask": (st.sampled_from((0o000, 0o022, 0o077, 0o002)),),
    }


#: those that make what the others need, or change it, come more often
_OFTEN: Final = ("open", "open", "open", "write", "mkdir", "link", "rename", "rename", "symlink",
                 "stat", "list", "setxattr", "chmod", "chown", "unlink")


def operations(users: list[int], ids: list[int]) -> st.SearchStrategy[Operation]:
    """One operation of one of so many users, on files of whom ``ids`` names."""
    verbs = _verbs(st.sampled_from((-1, *ids)))
    verbs_of = st.sampled_from((*verbs, *_OFTEN)).flatmap(
        lambda verb: st.tuples(st.just(verb), st.tuples(*verbs[verb])))
    setting_acls = st.tuples(st.just("setxattr"), st.tuples(_at, _acls, st.just(_ACL), st.just(0)))
    return st.builds(lambda user, call: (user, *call), st.sampled_from(users),
                     st.one_of(*[verbs_of] * 30, setting_acls))
