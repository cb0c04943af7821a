"""A ring of updates in place of recurrent states (`--enable-linear-replayssm-spec`): answers are those of speculation
off, with conversations, chunks, snapshots, retractions and steps of any width."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arms import ADMIT_ALL, HYBRID_DRAFT, HYBRID_TARGET, ON_CPU, POISONED, POISONED_EVERY_WIDTH
from transformers import AutoTokenizer

from equality import ask_off, assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, Completion, held_out_prompts_in_turn

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("state ring")]
MODEL = [*ON_CPU, "--model-path", str(HYBRID_TARGET), "--max-running-requests", "8", "--mamba-track-interval", "64"]
SPECULATE = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(HYBRID_DRAFT)]
RING = ["--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"]
CHUNKS = ["--chunked-prefill-size", "64"]
MIXED = [*CHUNKS, "--enable-mixed-chunk"]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
SESSIONS, TURNS, NEW_TOKENS = 8, 3, 60
# The blocks have 8 rows: states of a ring of 32 lag, those of a ring of 16 do not.
SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    "32, snapshots, every width": (
        [*RING, "32", "--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "44", *CHUNKS],
        TINY_OVERLAPPING | POISONED_EVERY_WIDTH | RETRACT,
    ),
    "16, no buffer, mixed chunks": (
        [*RING, "16", "--mamba-radix-cache-strategy", "no_buffer", "--max-mamba-cache-size", "28", *MIXED],
        TINY_ENVIRONMENT | POISONED | RETRACT,
    ),
}
Session = list[tuple[list[int], Completion]]  # each turn's whole prompt, and its answer


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Session]]:
    tokenizer = AutoTokenizer.from_pretrained(HYBRID_TARGET)
    questions = [each.prompt for each in held_out_prompts_in_turn()]
    flags = [*MODEL, "--max-mamba-cache-size", "16", "--disable-overlap-schedule", "--disable-radix-cache"]
    log = tmp_path_factory.mktemp("off") / "off.log"
    with PreloadedServer([*flags, "--max-total-tokens", "8192"], log, TINY_ENVIRONMENT) as server:
        client = server.client()

        def turns(session: int) -> Session:
            told: Session = []
            for turn in range(TURNS):
                question = questions[(session * 7 + turn * 13) % len(questions)]
                words = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                prompt = (told[-1][0] + told[-1][1].ids if told else []) + tokenizer.encode(words)
                told.append((prompt, ask_off(client, prompt, max_new_tokens=NEW_TOKENS)))
            return told

        yield [turns(session) for session in range(SESSIONS)]


def _tell(client: Client, session: Session) -> list[Completion]:
    return [client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt, _ in session]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_ring_of_updates(setting: str, sessions: list[Session], tmp_path: Path) -> None:
    """Fails where an answer differs from that of speculation off, nothing was retracted, no prefix was hit, or the
    server kept states of all rows."""
    flags, environment = SETTINGS[setting]
    flags = [*MODEL, *SPECULATE, *flags, "--max-total-tokens", "8192"]
    with (
        PreloadedServer(flags, tmp_path / "on.log", environment | ADMIT_ALL) as server,
        ThreadPoolExecutor(SESSIONS) as pool,
    ):
        client = server.client()
        told = list(pool.map(lambda session: _tell(client, session), sessions))
    answers = [answer for session in told for answer in session]
    asked = [turn for session in sessions for turn in session]
    assert_equal_tokens(answers, [expected for _, expected in asked], [len(prompt) for prompt, _ in asked])
    assert tau(answers) > 1.2
    assert sum(answer.meta["num_retractions"] for answer in answers)
    assert any(answer.cached_tokens for session in told for answer in session[1:])
    log = server.log.read_text()
    assert "ReplaySSM ring buffers allocated" in log and "keeps a ring of updates" in log
