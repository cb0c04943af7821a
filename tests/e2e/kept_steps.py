"""Shows that no draft KV is lost: a request's steps equal those of the reference, whatever happened to its KV between.

At whole blocks a row's bits do not depend on other requests, so a request's steps follow from its tokens alone. A
request that is prefilled again, after a retraction or a preemption, begins anew at the tokens that it had then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from arms import assert_same_steps
from reference_pair import ReferencePair

from sglang_dflash.serving import Client, Completion, Server

PREFILLS = re.compile(r"prefill of (\S+) after (\d+) tokens")
DIGESTS = re.compile(r"draft KV of (\S+): (\w+)")


def digests_of(server: Server) -> dict[str, list[str]]:
    """By request id: digests of the draft's KV of its prompt, one of each rank (from the same log)."""
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
    for prompt, answer in zip(prompts, answers, strict=True):
        starts = prefills[answer.meta["id"]]
        assert starts[0] == 0 and len(starts) <= 1 + answer.meta["num_retractions"], (starts, answer.meta)
        lens: list[int] = []
        for start, end in pairwise([*starts, len(answer.ids)]):
            seen = [*prompt, *answer.ids[:start]]
            (alone,) = oracle.generate([seen], len(answer.ids) - start)
            emitted = start + 1
            for commit_len in alone.commit_lens:
                if emitted >= end:
                    break
                emitted += commit_len
                lens.append(commit_len)
            assert emitted >= end, (starts, emitted, end)
        assert_same_steps(answer, lens)


def prefilled(client: Client) -> int:
    """Tokens whose draft KV was computed in prefills so far."""
    (state,) = client.get("/server_info")["internal_states"]
    return int(state["dflash_prefilled"])
