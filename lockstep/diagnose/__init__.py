"""Explains failures: known errors, their fixes and symptoms (`known_errors`), checks before a run (`doctor`).

It reads files and the environment, and returns text. torch is loaded only by checks that need it.
"""

from dataclasses import asdict, dataclass

GOOD, WARN, BAD = "✓", "⚠", "✗"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: str  # ✓, ⚠ or ✗
    name: str  # what was checked
    found: str  # the result
    do: str = ""  # what to do about it, if anything

    def __str__(self) -> str:
        text = f"{self.status} {self.name:<16} {self.found}"
        return f"{text}\n  {'':<16} do: {self.do}" if self.do else text

    @classmethod
    def warn_unless(cls, good: bool, name: str, found: str, do: str) -> "Finding":
        """Return a good finding, or a warning with what to do."""
        return cls(GOOD, name, found) if good else cls(WARN, name, found, do)

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON's types."""
        words = {GOOD: "good", WARN: "warning", BAD: "bad"}
        return asdict(self) | {"status": words[self.status]}
