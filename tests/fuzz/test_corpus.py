"""What fuzzing found, and what its inputs begin with, replayed; and a moment of it anew."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import blind
from tests.fuzz.targets import TARGETS, corpus, run


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_was_found_is_an_error_of_the_projects_own(name: str) -> None:
    seeds = sorted(corpus(name).glob("*"))
    assert seeds, "each target has something to begin with"
    for seed in seeds:
        try:
            run(name, seed.read_bytes())
        except BaseException as error:
            error.add_note(str(seed))
            raise
    assert blind(name, 0.02) > 0


def test_every_corpus_has_a_target() -> None:
    assert {path.name for path in corpus("").iterdir()} == set(TARGETS)
