"""Decides whether an answer of the target is right, by kind."""

import ast

from tools.tiny_pair.arithmetic import final_number
from tools.tiny_pair.snippets import fenced_code


def number_is_right(reference: str, answer: str) -> bool:
    """Whether `answer` ends in the reference's number."""
    wanted = final_number(reference)
    return wanted is not None and final_number(answer) == wanted


def code_parses(answer: str) -> bool:
    """Whether `answer` holds a closed ```python fence with code that parses."""
    code = fenced_code(answer)
    if code is None:
        return False
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):  # ValueError: null bytes in the source
        return False
    return True


def is_right(kind: str, reference: str, answer: str, ended: bool) -> bool:
    """Arithmetic: the right number. Code: it parses. Chat: the answer has ended."""
    if kind == "arithmetic":
        return number_is_right(reference, answer)
    if kind == "code":
        return code_parses(answer)
    return ended


def has_ended(ids: list[int], end_id: int) -> bool:
    """Whether generated `ids` end with the end token, not at a length limit."""
    return bool(ids) and ids[-1] == end_id
