"""The account of an agent in its file of counters (``counters.h``): what ctxd and the meter have in
common, who share these files and nothing else."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Final

from runtime.texts import limits

#: of the files, and their size; where an account is, and how long the name is, which it begins with
VERSION: Final = 2
SIZE: Final = 12288
SPENT: Final = 8192
NAME_SIZE: Final = 128
NO_LIMIT: Final = (1 << 64) - 1
#: why a request was refused, in ``Spent.trouble``; the number of the payer is below it
TOKENS_USED, COST_USED, NO_RATE = 1, 2, 3
TROUBLE_SHIFT: Final = 32


@dataclass(slots=True)
class Spent:
    """Use of models, in the order of the file. The first two are limits; ``cost`` and its limit are
    in 10⁻⁹ of the operator's unit."""

    tokens_max: int = NO_LIMIT
    cost_max: int = NO_LIMIT
    input: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    estimated: int = 0
    cost: int = 0
    requests: int = 0
    refused: int = 0
    unpriced: int = 0
    trouble: int = 0
    spare: int = 0
    owner: int = 0

    @property
    def sums(self) -> tuple[int, ...]:
        """The numbers that outlive a reboot (``Agent.spent``)."""
        return astuple(self)[2:11]

    @property
    def tokens(self) -> int:
        """The tokens that ``tokens.max`` limits."""
        return self.input + self.output

    @property
    def usage(self) -> dict[str, int | float]:
        return {
            "tokens.in": self.input,
            "tokens.cached": self.cached,
            "tokens.written": self.written,
            "tokens.out": self.output,
            "tokens.estimated": self.estimated,
            "cost": self.cost / limits.UNIT,
            "requests": self.requests,
            "requests.refused": self.refused,
            "requests.unpriced": self.unpriced,
        }


NOTHING_SPENT: Final = Spent().sums
#: where each of its numbers is in a file
PLACES: Final = {each.name: SPENT + NAME_SIZE + 8 * n for n, each in enumerate(fields(Spent))}
