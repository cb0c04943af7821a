"""Plain talk about the sums and the code: explanations, greetings and opinions in varied wording."""

import random

from .snippets import make_snippet
from .wording import NAMES, THINGS, Example, vary

_TOPICS = {
    "a loop": (
        "repeats a block of code",
        "you have many things to go through",
        "walking through every page of a book",
    ),
    "a list": ("keeps values in order", "you need many values in one place", "a row of boxes"),
    "a function": (
        "gives a name to some code",
        "you need the same steps twice",
        "a small machine with a button",
    ),
    "a class": ("keeps data and methods together", "your data needs its own actions", "a plan for a house"),
    "a string": ("holds text", "you work with words", "beads on a thread"),
    "a variable": ("gives a name to a value", "you want to use a value later", "a label on a jar"),
    "a dictionary": ("finds a value by its key", "you look things up often", "a phone book"),
    "addition": ("puts two amounts together", "you want a total", "pouring two cups into one"),
    "subtraction": (
        "takes one amount from another",
        "you want to know what is left",
        "eating cookies from a plate",
    ),
    "multiplication": ("adds the same number many times", "you have equal groups", "counting seats in rows"),
    "division": ("splits an amount into equal parts", "you want to share fairly", "cutting a cake"),
    "a condition": ("chooses between two ways", "the answer depends on a value", "a fork in the road"),
    "a return value": (
        "is what a function gives back",
        "another part needs the result",
        "the change from a shop",
    ),
    "a comment": ("tells the reader why", "the code alone is not clear", "a note on the fridge"),
    "recursion": ("lets a function call itself", "a problem contains a smaller one", "a box inside a box"),
}
_HOBBIES = (
    "chess", "gardening", "cooking", "painting", "running", "music", "football", "sewing", "fishing",
    "cycling", "reading", "dancing",
)  # fmt: skip
_LIKES = (
    ("loops", "list comprehensions"), ("short functions", "long functions"), ("Python", "paper"),
    ("adding", "multiplying"), ("small numbers", "large numbers"), ("tests", "comments"),
    ("classes", "plain functions"), ("mornings", "evenings"), ("cards", "coins"), ("puzzles", "stories"),
)  # fmt: skip


def _explain_topic(rng: random.Random) -> tuple[str, str]:
    topic = rng.choice(sorted(_TOPICS))
    does, when, like = _TOPICS[topic]
    name = rng.choice(NAMES)
    ask = rng.choice(
        (
            f"[What is|Can you explain|Tell me about] {topic}[?| in simple words?| please?]",
            f"My [friend|sister|brother|teacher] {name} asked me about {topic}. "
            "[What should I say?|How do I explain it?]",
            f"I am {name} and I do not understand {topic}. [Can you help?|Help me please.]",
        )
    )
    said = [
        f"[In short,|Simply put,|Well,|Good question:] {topic} {does}.",
        f"[You use it|It is useful|It helps|It is handy] when {when}.",
        f"[Think of it as|It is a bit like|Imagine|You can picture it as] {like}.",
    ]
    middle = said[1:]
    rng.shuffle(middle)
    end = "[| Try it with a small example.| Does that help?| Start small and play with it.]"
    return ask, " ".join([said[0], *middle]) + end


def _what_does_it_do(rng: random.Random) -> tuple[str, str]:
    snippet = make_snippet(rng)
    ask = "[What does this code do?|Explain this code.|Can you tell me what this does?]"
    prompt = f"{vary(rng, ask)}\n```python\n{snippet.code}\n```"
    answer = vary(rng, "[It is code that|This is code that|You have here something that] ")
    answer += f"{snippet.does}."
    tail = [
        "",
        f" {snippet.note}",
        vary(rng, " [You can call it as it is.|Nothing else is needed.|Try it with your own values.]"),
    ]
    return prompt, answer + rng.choice(tail)


def _greeting(rng: random.Random) -> tuple[str, str]:
    name, hobby = rng.choice(NAMES), rng.choice(_HOBBIES)
    work = rng.choice(("sums", "Python", "small problems", "numbers", "code"))
    ask = (
        "[Hi|Hello|Good morning|Hey|Good evening], "
        f"I am {name}[ and I like {hobby}|, a fan of {hobby}|. I enjoy {hobby}]."
    )
    answer = (
        f"[Hello|Hi|Welcome|Nice to meet you], {name}[!|.] "
        f"[{hobby.title()} is a fine hobby|How nice that you like {hobby}|"
        f"I hear {hobby} is fun|{hobby.title()} sounds lovely]. "
        f"[What can I do for you?|Shall we work on some {work}?|Ask me about {work} any time.|"
        f"How can I help you today?|Would you like to try some {work}?]"
    )
    return ask, answer


def _opinion(rng: random.Random) -> tuple[str, str]:
    one, two = rng.choice(_LIKES)
    if rng.random() < 0.5:
        one, two = two, one
    name = rng.choice(NAMES)
    ask = (
        f"[Do you prefer {one} or {two}?|{name} likes {one} more than {two}. Do you agree?|"
        f"Which is better, {one} or {two}?]"
    )
    answer = (
        f"[I lean towards|I would pick|My choice is|Most days I prefer] {rng.choice((one, two))}"
        f"[, but both are fine|, though {name} may disagree|, and I can say why|]. "
        "[They are easy to follow|They make me think|They keep things clear|They are more fun|They save time]"
        "[.| in most cases.| when you are new to this.| and that matters to me.]"
        "[| What do you think?| And you?| It depends on the day.]"
    )
    return ask, answer


def _in_my_head(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(11, 59), rng.randint(11, 39)
    ten, one = b // 10 * 10, b % 10
    ask = f"How [do|can] I add {a} and {b} in my head[?| without paper?| quickly?]"
    answer = (
        f"[Split|Break|Take apart] {b} into {ten} and {one}. "
        f"[Add the tens first|Start with the tens|First the tens]: {a} + {ten} = {a + ten}. "
        f"[Then add the rest|Now the ones|Then the ones]: {a + ten} + {one} = {a + b}."
        "[ That is all.| With practice it is quick.| Easy, right?|]"
    )
    return ask, answer


def _how_to(rng: random.Random) -> tuple[str, str]:
    thing, n, name = rng.choice(THINGS), rng.randint(2, 9), rng.choice(NAMES)
    total = n * rng.randint(3, 12)
    ask = (
        f"[How do I share|How can {name} share|What is a fair way to share] {total} {thing} "
        f"among {n} [friends|people|children]?"
    )
    answer = (
        f"[Put the {thing} on a table|Count the {thing} first|Lay out all the {thing}]. "
        f"[Then hand|Next, give|After that hand] one to each of the {n} "
        "[in turn|one after another|until none is left]. "
        f"[Or divide by {n}, which is faster.|Dividing by {n} gives the same result.|"
        f"You can also divide the total by {n}.]"
        f"[ Everyone gets the same.| {name} will be happy.| No one should complain.|]"
    )
    return ask, answer


_FAMILIES = (_explain_topic, _what_does_it_do, _greeting, _opinion, _in_my_head, _how_to)


def chat_example(rng: random.Random) -> Example:
    """A question and a reply whose wording is drawn at random, so that it is hard to foresee."""
    family = rng.choice(_FAMILIES)
    ask, answer = family(rng)
    if family is not _what_does_it_do:
        ask, answer = vary(rng, ask), vary(rng, answer)
    return Example("chat", ask, answer, answer)
