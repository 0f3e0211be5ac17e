"""The collector looks at what stays only once it has doubled."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from ctxfs.collecting import Collecting

class Ring:
    gone = 0
    def __init__(self):
        self.me = self
    def __del__(self):
        Ring.gone += 1

kept = [Ring() for _ in range(1000)]
Collecting().begin()
aside = gc.get_freeze_count()
assert aside > 1000, aside
gc.collect()
assert aside <= gc.get_freeze_count() < aside + 500, "what is new is set aside, too"

Ring()
gc.collect()
assert Ring.gone == 1, "a new cycle is collected"
del kept
gc.collect()
assert Ring.gone == 1, "what was set aside is not looked at"

more = [[] for _ in range(3 * aside)]
gc.collect()
assert gc.get_freeze_count() == 0, "it has more than doubled"
gc.collect()
assert Ring.gone == 1001, "all is looked at"
assert gc.get_freeze_count() > 3 * aside
"""


def test_what_stays_is_looked_at_again_when_it_has_doubled() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stderr
