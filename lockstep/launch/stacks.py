"""The stacks that ranks write when they are asked (`kill -QUIT`), and what can be read off them."""

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.failures import short_path

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_TORCH = re.compile(r"/torch/|<frozen ")
_COLLECTIVE = re.compile(r"/torch/distributed/")
_OURS = re.compile(r"/lockstep/|/torch/|/site-packages/|/lib/python\d|<frozen ")


def stacks_file(logs: Path, rank: int) -> Path:
    """Where a rank's stacks go."""
    return logs / f"rank-{rank}.stacks.txt"


@dataclass(frozen=True)
class Stack:
    """The main thread of one rank, innermost frame first: (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...] = ()

    @property
    def place(self) -> str | None:
        """The user's own frame if there is one, else the innermost."""
        if not self.frames:
            return None
        own = next((frame for frame in self.frames if not _OURS.search(frame[0])), self.frames[0])
        return f"{short_path(own[0])}:{own[1]} in {own[2]}"

    @property
    def in_torch(self) -> bool:
        """Whether the innermost frame is torch's."""
        return bool(self.frames) and bool(_TORCH.search(self.frames[0][0]))

    @property
    def in_collective(self) -> bool:
        """Whether code of the user's own waits in a collective."""
        for file, _, _ in self.frames:
            if _COLLECTIVE.search(file):
                return True
            if not _OURS.search(file):
                return False
        return False


def newest_stack(logs: Path, rank: int) -> Stack:
    """Of the last time that the rank was asked; empty where it never answered."""
    try:
        text = stacks_file(logs, rank).read_text(errors="replace")
    except OSError:
        return Stack()
    blocks = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)
    return Stack(tuple((m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(blocks[-1])))
