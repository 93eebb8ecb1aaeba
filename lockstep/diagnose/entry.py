"""One row of the tables of known errors."""

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class KnownError:
    """A failure that is recognised by its text.

    Attributes:
        name: short, unique.
        pattern: searched for in the error's text or the end of a rank's log, without regard to case.
        cause: what is behind it, one sentence without a final full stop.
        mend: what to do, the same.
        example: the text as libraries write it; needed where `needs` is set, as no test provokes it.
        needs: what it takes to provoke it, beyond a machine with a CPU.
        consequence: another rank's failure usually explains it; that one is to be told first.
    """

    name: str
    pattern: str
    cause: str
    mend: str
    example: str = ""
    needs: str = ""
    consequence: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE)
