"""Settings that do not go with a placement."""

from __future__ import annotations

from typing import Any, cast

import pytest

from runtime.agents.placing import _workspace
from runtime.errors import UnsupportedError


@pytest.mark.parametrize("value", ["inherit", "worktree", "explicit_root:/srv"])
def test_a_workspace_of_this_machine_does_not_reach_a_node(value: str) -> None:
    found = _workspace(cast(Any, None), cast(Any, None), value)
    assert (found is None) is (value in ("inherit", "worktree"))
    if found is not None:
        assert found[0] is UnsupportedError and found[1].endswith("; use inherit")
