"""Texts of ``placement``: what they say, and how they are refused."""

from __future__ import annotations

import pytest

from runtime.errors import MalformedError
from runtime.texts import placement

KNOWN = ("gpu1", "gpu2", "n2")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", ""), ("node=n2\n", "n2"), ("node=n2", "n2"), ("node=gpu*\n", "gpu*"), ("node=*", "*")],
)
def test_a_text_names_a_node_or_several_or_none(text: str, wanted: str) -> None:
    assert placement.parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("n2", '"n2" is not node=NAME or node=PREFIX\\*'),
        ("engine=slurm", '"engine=slurm" is not node=NAME'),
        ("node = n2", '"node = n2" is not node=NAME'),
        (" node=n2", '" node=n2" is not'),
        ("node=", '"" is not a name'),
        ("node=n2 ", '"n2 " is not a name'),
        ("node=-oX=y", '"-oX=y" is not a name'),
        ("node=n2,gpu1", '"n2,gpu1" is not a name'),
        ("node=g*1", '"g\\*1" is not a name'),
        ("\n", '"" is not node=NAME'),
    ],
)
def test_a_bad_line_is_named(text: str, wrong: str) -> None:
    with pytest.raises(MalformedError, match=f"^{wrong}"):
        placement.parse(text)


@pytest.mark.parametrize("more", ["node=n2", "node=gpu1", "", "memory=1G"])
def test_an_agent_runs_at_one_node(more: str) -> None:
    with pytest.raises(MalformedError, match=f'^line 2: "{more}" is one line too many'):
        placement.parse(f"node=n2\n{more}\n")


def test_a_prefix_means_all_that_begin_so() -> None:
    assert [name for name in KNOWN if placement.matches("gpu*", name)] == ["gpu1", "gpu2"]
    assert [name for name in KNOWN if placement.matches("gpu", name)] == []
    assert all(placement.matches("*", name) for name in KNOWN)
