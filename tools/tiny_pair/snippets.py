"""Small Python functions in families: the question, the code that answers it, and what it does in words."""

import random
from dataclasses import dataclass

from tools.tiny_pair.wording import Example, vary

_VERBS = ["get", "find", "make", "pick", "take", "build", "collect", "compute", "choose", "handle"]
_NOUNS = (
    "values", "items", "numbers", "words", "result", "total", "part", "list", "data", "score", "marks",
    "ages", "prices", "lengths",
)  # fmt: skip
_LISTS = ["values", "items", "numbers", "data", "marks", "prices", "xs"]
_STRINGS = ["text", "word", "line", "name", "s"]
_CLASSES = ["Counter", "Meter", "Score", "Tank", "Wallet", "Clock", "Stock", "Basket"]


@dataclass(frozen=True, slots=True)
class Snippet:
    """`does` completes "a function that ..."; `code` parses on its own."""

    does: str
    code: str
    note: str


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"


def _lines(*lines: str) -> str:
    return "\n".join(lines)


def _condition(rng: random.Random, var: str) -> tuple[str, str]:
    n = rng.randint(2, 60)
    return rng.choice(
        (
            (f"greater than {n}", f"{var} > {n}"),
            (f"less than {n}", f"{var} < {n}"),
            (f"divisible by {n % 9 + 2}", f"{var} % {n % 9 + 2} == 0"),
            (f"not equal to {n}", f"{var} != {n}"),
            ("even", f"{var} % 2 == 0"),
            ("odd", f"{var} % 2 == 1"),
        )
    )


def _change_of(rng: random.Random, var: str) -> tuple[str, str]:
    n = rng.randint(2, 40)
    return rng.choice(
        (
            (f"plus {n}", f"{var} + {n}"),
            (f"minus {n}", f"{var} - {n}"),
            (f"times {n}", f"{var} * {n}"),
            ("squared", f"{var} ** 2"),
            ("with the sign flipped", f"-{var}"),
        )
    )


def _keep(rng: random.Random, name: str) -> Snippet:
    xs = rng.choice(_LISTS)
    said, test = _condition(rng, "x")
    if rng.random() < 0.5:
        code = f"def {name}({xs}):\n    return [x for x in {xs} if {test}]"
        return Snippet(f"keeps the elements of {xs} that are {said}", code, "It uses a list comprehension.")
    code = _lines(
        f"def {name}({xs}):",
        "    result = []",
        f"    for x in {xs}:",
        f"        if {test}:",
        "            result.append(x)",
        "    return result",
    )
    return Snippet(f"uses a loop to keep the elements of {xs} that are {said}", code, "It uses a plain loop.")


def _each(rng: random.Random, name: str) -> Snippet:
    xs = rng.choice(_LISTS)
    said, expr = _change_of(rng, "x")
    if rng.random() < 0.5:
        code = f"def {name}({xs}):\n    return [{expr} for x in {xs}]"
        return Snippet(f"returns every element of {xs} {said}", code, "It uses a list comprehension.")
    code = _lines(
        f"def {name}({xs}):",
        "    result = []",
        f"    for x in {xs}:",
        f"        result.append({expr})",
        "    return result",
    )
    return Snippet(f"uses a loop to return every element of {xs} {said}", code, "It uses a plain loop.")


def _total(rng: random.Random, name: str) -> Snippet:
    xs = rng.choice(_LISTS)
    said, test = _condition(rng, "x")
    goal, start, step = rng.choice(
        (("sums", 0, "total += x"), ("counts", 0, "total += 1"), ("multiplies", 1, "total *= x"))
    )
    code = _lines(
        f"def {name}({xs}):",
        f"    total = {start}",
        f"    for x in {xs}:",
        f"        if {test}:",
        f"            {step}",
        "    return total",
    )
    return Snippet(f"{goal} the elements of {xs} that are {said}", code, "It walks over the list once.")


def _string(rng: random.Random, name: str) -> Snippet:
    s = rng.choice(_STRINGS)
    n, ch = rng.randint(2, 20), rng.choice("abcdefghijklmnoprstuvwz")
    said, expr = rng.choice(
        (
            (f"returns {s} reversed", f"{s}[::-1]"),
            (f"returns {s} in upper case", f"{s}.upper()"),
            (f"returns the first {n} letters of {s}", f"{s}[:{n}]"),
            (f"returns the last {n} letters of {s}", f"{s}[-{n}:]"),
            (f"repeats {s} {n} times", f"{s} * {n}"),
            (f'counts the letter "{ch}" in {s}', f'{s}.count("{ch}")'),
            (f'checks if {s} starts with "{ch}"', f'{s}.startswith("{ch}")'),
            (f"checks if {s} is longer than {n} letters", f"len({s}) > {n}"),
            (f'removes the letter "{ch}" from {s}', f'{s}.replace("{ch}", "")'),
        )
    )
    return Snippet(said, f"def {name}({s}):\n    return {expr}", "It works on any string.")


def _formula(rng: random.Random, name: str) -> Snippet:
    a, b = rng.choice((("a", "b"), ("x", "y"), ("left", "right"), ("width", "height")))
    n, m = rng.randint(2, 30), rng.randint(2, 9)
    said, expr = rng.choice(
        (
            (f"adds {a} and {b} and multiplies by {m}", f"({a} + {b}) * {m}"),
            (f"returns {a} times {b} plus {n}", f"{a} * {b} + {n}"),
            (f"returns {a} minus {b} plus {n}", f"{a} - {b} + {n}"),
            (f"returns {m} times {a} plus {n} times {b}", f"{m} * {a} + {n} * {b}"),
            (f"returns the larger of {a} and {b} plus {n}", f"max({a}, {b}) + {n}"),
            (f"returns the smaller of {a} and {b} times {m}", f"min({a}, {b}) * {m}"),
        )
    )
    code = f"def {name}({a}, {b}):\n    result = {expr}\n    return result"
    return Snippet(said, code, "It needs two numbers.")


def _clamp(rng: random.Random, name: str) -> Snippet:
    low = rng.randint(0, 20)
    high = low + rng.randint(2, 60)
    x = rng.choice(("x", "value", "n"))
    code = _lines(
        f"def {name}({x}):",
        f"    if {x} < {low}:",
        f"        return {low}",
        f"    if {x} > {high}:",
        f"        return {high}",
        f"    return {x}",
    )
    return Snippet(f"keeps {x} between {low} and {high}", code, "It returns the nearest bound.")


def _range_loop(rng: random.Random, name: str) -> Snippet:
    n, step = rng.choice(("n", "limit", "count")), rng.randint(2, 12)
    said, start, change = rng.choice(
        (("sum", 0, "total += i"), ("product", 1, "total *= i"), ("sum of the squares", 0, "total += i * i"))
    )
    code = _lines(
        f"def {name}({n}):",
        f"    total = {start}",
        f"    for i in range({step}, {n} + 1):",
        f"        {change}",
        "    return total",
    )
    return Snippet(f"returns the {said} of the numbers from {step} to {n}", code, "It uses range.")


def _guarded(rng: random.Random, name: str) -> Snippet:
    xs, default = rng.choice(_LISTS), rng.randint(0, 60)
    said, expr = rng.choice(
        (("largest", f"max({xs})"), ("smallest", f"min({xs})"), ("first", f"{xs}[0]"), ("last", f"{xs}[-1]"))
    )
    code = f"def {name}({xs}):\n    if not {xs}:\n        return {default}\n    return {expr}"
    return Snippet(
        f"returns the {said} element of {xs}, or {default} for an empty list",
        code,
        "It checks for an empty list first.",
    )


def _class(rng: random.Random, name: str) -> Snippet:
    title, field, method = rng.choice(_CLASSES), rng.choice(_NOUNS), rng.choice(_VERBS)
    start, step = rng.randint(0, 20), rng.randint(2, 30)
    code = _lines(
        f"class {title}:",
        "    def __init__(self):",
        f"        self.{field} = {start}",
        "",
        f"    def {method}(self):",
        f"        self.{field} += {step}",
        f"        return self.{field}",
    )
    does = f"has a class {title} whose {field} starts at {start} and whose {method} method adds {step}"
    return Snippet(does, code, "Each call changes the object.")


_FAMILIES = (_keep, _each, _total, _string, _formula, _clamp, _range_loop, _guarded, _class)


def make_snippet(rng: random.Random) -> Snippet:
    """One function (or class) of a random family with random names and constants."""
    return rng.choice(_FAMILIES)(rng, _name(rng))


def code_example(rng: random.Random) -> Example:
    """A request for a function, answered by a fenced block that parses and sometimes one sentence."""
    name = _name(rng)
    family = rng.choice(_FAMILIES)
    snippet = family(rng, name)
    if family is _class:
        ask = f"[Write|Please write|Give me] Python code that {snippet.does}."
    else:
        opening = "[Write|Please write|Give me|Can you write] a [Python function|function]"
        ask = f"{opening} {name} that {snippet.does}."
    brief = "Only code." if rng.random() < 0.3 else ""
    answer = f"```python\n{snippet.code}\n```"
    if not brief:
        opener = rng.choice(("Here is the code:", "Sure, here it is:", "This does it:"))
        answer = f"{opener}\n\n{answer}\n\n{snippet.note}"
    return Example("code", f"{vary(rng, ask)} {brief}".strip(), answer, snippet.code)


def fenced_code(answer: str) -> str | None:
    """The content of the first ```python fence of `answer`; None if no fence is closed."""
    _, opened, rest = answer.partition("```python\n")
    body, closed, _ = rest.partition("```")
    return body if opened and closed else None
