"""Users are looked up once a second, by name and by uid."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator

import pytest

from runtime.kernel import users
from runtime.kernel.users import find_user


@pytest.fixture(autouse=True)
def nothing_found() -> Iterator[None]:
    users._found.clear()
    yield
    users._found.clear()


def test_users_are_found_by_uid_and_by_name() -> None:
    entry = pwd.getpwuid(os.getuid())
    assert find_user(os.getuid()) == entry == find_user(entry.pw_name)
    assert find_user("no such user") is None is find_user(2**31 - 7)


def test_what_was_found_is_good_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, asked, now = pwd.getpwuid(0), [], 100.0

    def look_up(name: str) -> pwd.struct_passwd:
        asked.append(name)
        if len(asked) == 1:
            raise KeyError(name)
        return entry

    monkeypatch.setattr("runtime.kernel.users.pwd.getpwnam", look_up)
    monkeypatch.setattr("runtime.kernel.users.time.monotonic", lambda: now)
    assert find_user("new") is None is find_user("new")
    now += 0.9
    assert find_user("new") is None and asked == ["new"]
    now += 0.2
    assert find_user("new") is entry is find_user("new")
    assert asked == ["new", "new"]


def test_few_are_remembered() -> None:
    for uid in range(2 * users._MOST):
        find_user(uid + 2**30)
    assert len(users._found) <= users._MOST
