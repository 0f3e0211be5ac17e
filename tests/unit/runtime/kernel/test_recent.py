"""What goes when there is no room, and who is told of it."""

from __future__ import annotations

from runtime.kernel.recent import Recent


def test_what_was_not_used_for_longest_goes_first() -> None:
    gone: list[int] = []
    recent = Recent[str, int](3, gone.append)
    for number, key in enumerate("abc"):
        recent.put(key, number)
    assert recent.get("a") == 0
    recent.put("d", 3)
    assert gone == [1]
    assert [recent.get(key) for key in "abcd"] == [0, None, 2, 3]
    recent.put("a", 9)
    assert gone == [1, 0]
    recent.drop("none")
    recent.clear()
    assert sorted(gone) == [0, 1, 2, 3, 9]
    assert len(recent) == 0


def test_weights_count_and_one_is_kept_however_heavy() -> None:
    recent = Recent[str, int](10)
    recent.put("a", 1, 4)
    recent.put("b", 2, 6)
    recent.put("b", 3, 5)
    assert len(recent) == 2
    recent.put("c", 4, 2)
    assert recent.get("a") is None
    recent.put("d", 5, 100)
    assert len(recent) == 1
    assert recent.get("d") == 5
