"""Templates (filled in next)."""

from lockstep.config.files import ResolvedFile
from lockstep.config.tree import Node


def is_template(text: str) -> bool:
    return False


def render(file: ResolvedFile) -> Node:
    raise NotImplementedError
