"""Word problems in small numbers, with answers worked step by step."""

import random

from tools.tiny_pair.wording import NAMES, THINGS, Example, vary

_ASK = "[ Show your steps.| Think step by step.| Explain each step.||]"


def _worked(steps: list[tuple[str, str, int]], unit: str) -> str:
    lines = [f"{said}: {expr} = {value}." for said, expr, value in steps]
    return "\n".join(lines) + f"\nThe answer is {steps[-1][2]}{unit}."


def _gain_and_loss(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(10, 60), rng.randint(3, 39)
    c = rng.randint(2, min(a + b - 1, 40))
    gain, got = rng.choice((("buys", "Buying"), ("finds", "Finding"), ("wins", "Winning")))
    lose, lost = rng.choice((("gives away", "giving away"), ("loses", "losing"), ("sells", "selling")))
    ask = f"[{name} has {a} {thing}|There are {a} {thing} on the desk of {name}]. "
    ask += f"{name} {gain} {b} more and then {lose} {c}. How many {thing} are left?"
    steps = [(f"{got} {b} more", f"{a} + {b}", a + b), (f"Then {lost} {c}", f"{a + b} - {c}", a + b - c)]
    return ask, f"{name} starts with {a} {thing}.\n" + _worked(steps, f" {thing}")


def _boxes(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    size, count, loose = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 30)
    box, boxes = rng.choice((("box", "boxes"), ("bag", "bags"), ("jar", "jars"), ("crate", "crates")))
    ask = f"[Each {box} holds|One {box} has] {size} {thing}. "
    ask += f"{name} has {count} {boxes} and {loose} loose {thing}. "
    ask += f"How many {thing} does {name} have[ in all| in total|]?"
    full = size * count
    steps = [
        (f"The {boxes} hold", f"{count} * {size}", full),
        (f"With the {loose} loose {thing}", f"{full} + {loose}", full + loose),
    ]
    return ask, _worked(steps, f" {thing}")


def _shopping(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    (one, ones), (two, twos) = rng.sample(
        [
            ("pen", "pens"),
            ("cup", "cups"),
            ("hat", "hats"),
            ("map", "maps"),
            ("lamp", "lamps"),
            ("ball", "balls"),
        ],
        2,
    )
    a, b, m, n = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 6), rng.randint(2, 6)
    ask = f"A {one} costs {a} coins and a {two} costs {b} coins. "
    ask += f"{name} buys {m} {ones} and {n} {twos}. How [many coins does {name} pay|much is that in coins]?"
    steps = [
        (f"The {ones} cost", f"{m} * {a}", m * a),
        (f"The {twos} cost", f"{n} * {b}", n * b),
        ("Together", f"{m * a} + {n * b}", m * a + n * b),
    ]
    return ask, _worked(steps, " coins")


def _change(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    price, count = rng.randint(2, 12), rng.randint(2, 8)
    paid = price * count + rng.randint(1, 30)
    ask = f"{name} buys {count} {thing} at {price} coins each and pays with {paid} coins. "
    ask += "[How much change is there|How many coins come back]?"
    cost = price * count
    steps = [
        (f"The {thing} cost", f"{count} * {price}", cost),
        ("The change is", f"{paid} - {cost}", paid - cost),
    ]
    return ask, _worked(steps, " coins")


def _sharing(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    each, friends = rng.randint(2, 12), rng.randint(2, 9)
    total = each * friends
    if total < 4:
        each, total = each + 2, (each + 2) * friends
    first = rng.randint(1, total - 1)
    ask = f"{name} picks {first} {thing} in the morning and {total - first} in the evening, "
    ask += f"then shares them equally among {friends} friends. How many {thing} does each friend get?"
    steps = [
        ("All together", f"{first} + {total - first}", total),
        (f"Shared among {friends}", f"{total} / {friends}", each),
    ]
    return ask, _worked(steps, f" {thing}")


def _reading(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    daily, days, left = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 40)
    pages = daily * days + left
    ask = f"A book has {pages} pages. {name} reads {daily} pages a day for {days} days. "
    ask += "How many pages are [left|still to read]?"
    read = daily * days
    steps = [(f"{name} reads", f"{days} * {daily}", read), ("Pages left", f"{pages} - {read}", left)]
    return ask, _worked(steps, " pages")


def _times_as_many(rng: random.Random) -> tuple[str, str]:
    (one, two), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, k = rng.randint(3, 16), rng.randint(2, 5)
    ask = f"{one} has {a} {thing}. {two} has {k} times as many. How many {thing} do they have together?"
    steps = [(f"{two} has", f"{k} * {a}", k * a), ("Together they have", f"{a} + {k * a}", a + k * a)]
    return ask, _worked(steps, f" {thing}")


def _bus(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 50), rng.randint(2, 20)
    c = rng.randint(2, min(a + b - 2, 25))
    d = rng.randint(2, 15)
    ride = rng.choice(("bus", "train", "boat", "tram"))
    ask = f"A {ride} has {a} people. At the first stop {b} get on. "
    ask += f"At the next stop {c} get off and {d} get on. How many people are on the {ride} [now|in the end]?"
    steps = [
        ("After the first stop", f"{a} + {b}", a + b),
        (f"When {c} get off", f"{a + b} - {c}", a + b - c),
        (f"When {d} get on", f"{a + b - c} + {d}", a + b - c + d),
    ]
    return ask, _worked(steps, " people")


def _expression(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 9)
    d = rng.randint(2, 30)
    shape = rng.randrange(3)
    if shape == 0:
        text, steps = f"({a} + {b}) * {c}", [(f"{a} + {b}", a + b), (f"{a + b} * {c}", (a + b) * c)]
    elif shape == 1:
        text, steps = f"{a} * {c} + {d}", [(f"{a} * {c}", a * c), (f"{a * c} + {d}", a * c + d)]
    else:
        text = f"{a} * {c} + {b} * {c}"
        steps = [(f"{a} * {c}", a * c), (f"{b} * {c}", b * c), (f"{a * c} + {b * c}", (a + b) * c)]
    ask = f"[What is {text}?|Compute {text}.|Work out {text}.|Please compute {text}.]"
    said = ["First", "Then", "Last"]
    return ask, _worked([(said[i], expr, value) for i, (expr, value) in enumerate(steps)], "")


_FAMILIES = (
    _gain_and_loss, _boxes, _shopping, _change, _sharing, _reading, _times_as_many, _bus, _expression,
)  # fmt: skip


def arithmetic_example(rng: random.Random) -> Example:
    """A word problem of two or three steps, its worked answer, and its operands as the key."""
    family = rng.choice(_FAMILIES)
    ask, answer = family(rng)
    prompt = vary(rng, ask + _ASK)
    digits = "".join(ch if ch.isdigit() else " " for ch in prompt).split()
    return Example("arithmetic", prompt, answer, f"{family.__name__}:{'-'.join(digits)}")


def final_number(answer: str) -> str | None:
    """The number after the last "The answer is", or None when the answer does not end that way."""
    _, found, tail = answer.rpartition("The answer is ")
    number = tail.split(" ")[0].strip().rstrip(".")
    return number if found and number.isdigit() else None
