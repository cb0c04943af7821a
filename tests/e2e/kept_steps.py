"""Shows that no draft KV is lost: a request's steps equal those of the reference, whatever happened to its KV between.

At whole blocks a row's bits do not depend on other requests, so a request's steps follow from its tokens alone. A
request that is prefilled again, after a retraction or a preemption, begins anew at the tokens that it had then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from arms import assert_same_steps
from reference_pair import ReferencePair

from sglang_dflash.serving import Client, Completion, Server

PREFILLS = re.compile(r"prefill of (\S+) after (\d+) tokens")
DIGESTS = re.compile(r"draft KV of (\S+): (\w+)")


def whole_pages(prompt: Sequence[int]) -> int:
    """Tokens of a prompt whose KV the plugin's digests are of."""
    return (len(prompt) - 1) // 16 * 16


def digests_of(server: Server) -> dict[str, list[str]]:
    """By request id: digests of the draft's KV of its prompt's whole pages, one of each rank (from the same log)."""
    found: dict[str, list[str]] = {}
    for rid, digest in DIGESTS.findall(server.log.read_text()):
        found.setdefault(rid, []).append(digest)
    return found


def prefills_of(server: Server) -> dict[str, list[int]]:
    """By request id: how many tokens were emitted at its prefills, 0 first (from the log of the plugin `poisoned`)."""
    found: dict[str, list[int]] = {}
    for rid, emitted in PREFILLS.findall(server.log.read_text()):
        counts = found.setdefault(rid, [])
        if int(emitted) not in counts:
            counts.append(int(emitted))
    return found


def assert_steps_kept(
    server: Server, oracle: ReferencePair, prompts: Sequence[list[int]], answers: Sequence[Completion]
) -> None:
    """Fails where a step accepts other drafts than the reference's, at any point of any answer."""
    prefills = prefills_of(server)
    segments = []
    for answer in answers:
        starts = prefills[answer.meta["id"]]
        assert starts[0] == 0 and len(starts) <= 1 + answer.meta["num_retractions"], (starts, answer.meta)
        segments.append(list(pairwise([*starts, len(answer.ids)])))
    rows = [(number, start) for number, own in enumerate(segments) for start, _ in own]
    longest = max(end - start for own in segments for start, end in own)
    begun = [[*prompts[number], *answers[number].ids[:start]] for number, start in rows]
    alone = iter(oracle.generate(begun, longest))
    for answer, own in zip(answers, segments, strict=True):
        lens = [commit_len for start, end in own for commit_len in steps_until(next(alone).commit_lens, end - start)]
        assert_same_steps(answer, lens)


def steps_until(commit_lens: Sequence[int], tokens: int) -> list[int]:
    """The steps behind a prefill, which emits one token itself, up to that which emits the last of `tokens`."""
    begins = accumulate(commit_lens, initial=1)  # tokens before each step
    return [commit_len for commit_len, before in zip(commit_lens, begins, strict=False) if before < tokens]


def prefilled(client: Client) -> int:
    """Tokens whose draft KV was computed in prefills so far."""
    (state,) = client.get("/server_info")["internal_states"]
    return int(state["dflash_prefilled"])
