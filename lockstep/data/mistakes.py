"""Says what a user's dataset or collate function did wrong, and where."""

import os
import traceback


def is_users_file(filename: str) -> bool:
    """Return whether a file is of the user's own code: not of a library, nor of Python."""
    return "site-packages" not in filename and "/lib/python" not in filename


def users_line(error: BaseException) -> str | None:
    """Return the deepest line of the traceback in the user's own code: file:line, function, text."""
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != here]
    own = [frame for frame in frames if is_users_file(frame.filename)]
    if not (own or frames):
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def reason(error: BaseException) -> str:
    """Return the error's class and the first line of its message; for one of a torch worker, those of its cause."""
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:  # its last line that is not indented
        return [line for line in text.splitlines() if line.strip() and not line.startswith(" ")][-1]
    return f"{type(error).__name__}: {text}".splitlines()[0]
