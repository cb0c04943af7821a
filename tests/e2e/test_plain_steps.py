"""Steps that draft nobody leave the draft's KV whole (TensorRT-LLM issue 16888): drafts are then as good as ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from arms import EVERY_WIDTH, ON_CPU, POOL, SPECULATE

from preloaded import PreloadedServer
from sglang_dflash.serving import (
    TINY_ENVIRONMENT,
    TINY_TARGET,
    Client,
    Completion,
    Server,
    greedy_body,
    held_out_prompts,
)

pytestmark = pytest.mark.server
DRAFTED = 96  # tokens behind the plain steps
ON_GPU = ["--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "fa3", "--sampling-backend", "pytorch"]
ARGUMENTS = [*POOL, *SPECULATE, "--model-path", str(TINY_TARGET), "--disable-radix-cache"]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    if request.param == "cpu":
        server = PreloadedServer([*ON_CPU, *ARGUMENTS], log, TINY_ENVIRONMENT | EVERY_WIDTH)
    else:
        server = Server([*ON_GPU, *ARGUMENTS], log, EVERY_WIDTH)
    with server as running:
        yield running.client()


def ask(client: Client, ids: list[int], name: str, tokens: int) -> Completion:
    return client.ask(greedy_body(ids, max_new_tokens=tokens, ignore_eos=True) | {"rid": name})


@pytest.mark.parametrize("plain_steps", [1, 7, 60])
def test_drafting_after_plain_steps_is_that_of_a_fresh_server(client: Client, plain_steps: int) -> None:
    """Fails where a step that drafts nobody leaves out the draft's KV of its token."""
    prompt = client.tokenize(held_out_prompts("arithmetic")[plain_steps].prompt)
    answer = ask(client, prompt, f"plain-{plain_steps}-then-drafts", plain_steps + DRAFTED)
    fresh = ask(client, prompt + answer.ids[:plain_steps], f"plain-0-fresh-{plain_steps}", DRAFTED)
    assert answer.ids[plain_steps:] == fresh.ids
    assert len(fresh.accept_histogram) > 4, "drafts were hardly accepted, so this test sees nothing"
    rejected, *others = answer.accept_histogram
    assert [rejected - plain_steps, *others] == fresh.accept_histogram
