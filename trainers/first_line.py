"""One line of an error of foreign code, for a message of our own."""

from __future__ import annotations


def first_line(error: BaseException | str) -> str:
    """The first line of what an error says that is not blank, or its type's name if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
