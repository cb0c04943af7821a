"""Chat about the sums and the code, worded so that a draft cannot predict much of it.

The wording is a chain of choices; each depends on the earlier ones (see `wording.Teller`). A greedy target follows one
arbitrary-looking path per question; a draft that guesses a block at once loses the path early.
"""

import random
import re

from tools.tiny_pair import phrases
from tools.tiny_pair.snippets import make_snippet
from tools.tiny_pair.wording import NAMES, THINGS, Example, Teller, vary

_START = re.compile(r"(^|[.!?] )([a-z])")


def _say(teller: Teller, patterns: list[tuple[str, ...]], **words: str) -> str:
    """One sentence from each group of patterns, with capital letters and full stops."""
    sentences = []
    for group in patterns:
        pattern = teller.pick(group)
        for name, value in words.items():
            pattern = pattern.replace("{" + name + "}", value)
        if sentence := teller.tell(pattern):
            sentences.append(sentence if sentence.endswith("?") else sentence + ".")
    return _START.sub(lambda m: m.group(1) + m.group(2).upper(), " ".join(sentences))


def _bodies(rng: random.Random, most: int) -> list[tuple[str, ...]]:
    """Pattern groups for 1 to `most` body sentences; the groups are disjoint, so no pattern occurs twice."""
    pool = list(phrases.BODIES)
    rng.shuffle(pool)
    count = rng.randint(1, most)
    return [tuple(pool[i::count]) for i in range(count)]


def _asked(rng: random.Random, ask: str) -> tuple[str, list[str]]:
    """The question, and its two longest words as cues, which influence the wording of the reply."""
    prompt = vary(rng, ask)
    words = sorted(set(re.findall(r"[a-z]{4,}", prompt)), key=lambda word: (-len(word), word))
    return prompt, words[:2]


def _explain(rng: random.Random) -> tuple[str, str]:
    topic, name = rng.choice(sorted(phrases.TOPICS)), rng.choice(NAMES)
    ask = rng.choice(
        (
            f"[What is|Can you explain|Tell me about|Please describe|What would you say about] {topic}"
            "[?| in simple words?| to a beginner?| in your own words?| before lunch?| once more?]",
            f"My [friend|sister|brother|teacher|neighbor|cousin] {name} [asked|wrote|talked] to me about {topic}. "
            "[What should I say?|How do I explain it?|What do you think?|Any ideas?]",
            f"I am {name} and I do not [understand|follow|trust|like] {topic}. "
            "[Can you help?|Help me please.|Where do I start?|What now?]",
            f"[Why|When|How] do [people|we|beginners|students] use {topic}[?| at school?| at work?| at home?]",
        )
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [topic, *cues])
    groups = [phrases.OPENINGS, *_bodies(rng, 3), phrases.CLOSINGS]
    return prompt, _say(teller, groups, topic=topic, does=phrases.TOPICS[topic])


def _what_does_it_do(rng: random.Random) -> tuple[str, str]:
    snippet = make_snippet(rng)
    ask = "[What does this code do?|Explain this code.|Can you tell me what this does?|Read this for me.]"
    teller = Teller(rng, [snippet.note])
    answer = f"[It is code that|This is code that|You have here something that] {snippet.does}."
    answer = f"{teller.tell(answer)} {_say(teller, [*_bodies(rng, 2), phrases.CLOSINGS])}"
    return f"{vary(rng, ask)}\n```python\n{snippet.code}\n```", answer


def _greeting(rng: random.Random) -> tuple[str, str]:
    name, hobby = rng.choice(NAMES), rng.choice(phrases.HOBBIES)
    ask = (
        "[Hi|Hello|Good morning|Hey|Good evening|Good day|Greetings], "
        f"[I am {name}|my name is {name}|this is {name}|{name} here]"
        f"[ and I like {hobby}|, a fan of {hobby}|. I enjoy {hobby}|, back from {hobby}]"
        "[.| today.| as always.|. How are you?|. What is new?]"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [name, hobby, *cues[:1]])
    groups = [phrases.WELCOMES, phrases.ON_HOBBIES, phrases.OFFERS]
    return prompt, _say(teller, groups, name=name, hobby=hobby)


def _opinion(rng: random.Random) -> tuple[str, str]:
    one, two = rng.sample(sorted(phrases.TOPICS), 2)
    name = rng.choice(NAMES)
    ask = (
        f"[Do you prefer {one} or {two}?|{name} likes {one} more than {two}. Do you agree?|"
        f"Which is [better|easier|nicer|safer], {one} or {two}?|Would you rather learn {one} or {two}?|"
        f"{name} cannot choose between {one} and {two}. Can you?]"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [one, two, *cues[:1]])
    first = teller.tell(
        "[I lean towards|I would pick|My choice is|Most days I prefer|I like|Give me|My vote goes to|I root for] "
        f"[{one}|{two}][, since|, because|, for|: in short,|, as] "
    )
    return prompt, first + _lowered(_say(teller, [phrases.REASONS, *_bodies(rng, 2), phrases.CLOSINGS]))


def _lowered(text: str) -> str:
    return text if text.startswith("I ") else text[:1].lower() + text[1:]


def _advice(rng: random.Random) -> tuple[str, str]:
    topic, name = rng.choice(sorted(phrases.TOPICS)), rng.choice(NAMES)
    ask = (
        f"[I feel|I am|{name} feels|{name} is] [stuck|lost|tired|bored|slow|unsure|nervous|confused] "
        f"[with|because of|after|about] {topic}. "
        "[Any advice?|What would you do?|What helps?|Please cheer me up.|What next?|Is that normal?]"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [topic, *cues])
    return prompt, _say(teller, [phrases.FEELINGS, *_bodies(rng, 3), phrases.CLOSINGS], topic=topic)


def _story(rng: random.Random) -> tuple[str, str]:
    topic, name = rng.choice(sorted(phrases.TOPICS)), rng.choice(NAMES)
    ask = (
        "[Tell me|Please write|Make up|I would like|Give me] a [short|little|funny|quiet|bedtime|tiny|brief] "
        f"[story|tale] about {name} and {topic}[.| please.| for my class.| before we start.]"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [topic, name, *cues[:1]])
    groups = [phrases.STORIES, *[phrases.DEEDS[i::2] for i in range(rng.randint(1, 2))], phrases.ENDS]
    return prompt, _say(teller, groups, topic=topic, name=name)


def _thanks(rng: random.Random) -> tuple[str, str]:
    topic, name = rng.choice(sorted(phrases.TOPICS)), rng.choice(NAMES)
    ask = (
        "[Thanks|Thank you|Great|Good|Many thanks], "
        f"[that helps with|that is clear about|now I see|I will think about|{name} will enjoy] {topic}"
        f"[.| now.| at last.|, says {name}.| for sure.]"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [topic, *cues])
    return prompt, _say(teller, [phrases.THANKED, phrases.OFFERS], name=name if name in prompt else "friend")


def _in_my_head(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(11, 59), rng.randint(11, 39)
    ten, one = b // 10 * 10, b % 10
    ask = f"How [do|can] I add {a} and {b} in my head[?| without paper?| quickly?| on a walk?]"
    teller = Teller(rng, [str(a), str(b)])
    answer = teller.tell(
        f"[Split|Break|Take apart|Cut] {b} into {ten} and {one}. "
        f"[Add the tens first|Start with the tens|First the tens]: {a} + {ten} = {a + ten}. "
        f"[Then add the rest|Now the ones|Then the ones]: {a + ten} + {one} = {a + b}. "
    )
    return vary(rng, ask), answer + _say(teller, _bodies(rng, 2))


def _how_to(rng: random.Random) -> tuple[str, str]:
    thing, n, name = rng.choice(THINGS), rng.randint(2, 9), rng.choice(NAMES)
    total = n * rng.randint(3, 12)
    ask = (
        f"[How do I share|How can {name} share|What is a fair way to share] {total} {thing} "
        f"among {n} [friends|people|children|players|guests]?"
    )
    prompt, cues = _asked(rng, ask)
    teller = Teller(rng, [thing, *cues])
    answer = teller.tell(
        f"[Put|Count|Lay out|Sort|Spread] the {thing} [on a table|on the floor|in a row|first|in the sun]. "
        f"[Then hand|Next, give|After that pass|Now send] one to each of the {n} "
        "[in turn|one after another|until none is left|with a smile|again and again]. "
    )
    return prompt, answer + _say(teller, [*_bodies(rng, 2), phrases.CLOSINGS])


_FAMILIES = {
    _explain: 26, _opinion: 18, _advice: 18, _story: 14, _greeting: 10, _thanks: 7, _what_does_it_do: 3,
    _in_my_head: 1, _how_to: 3,
}  # fmt: skip


def chat_example(rng: random.Random) -> Example:
    """A question and a reply that is hard to predict; both together are the key."""
    family = rng.choices(list(_FAMILIES), list(_FAMILIES.values()))[0]
    ask, answer = family(rng)
    return Example("chat", ask, answer, f"{ask}\n{answer}")
