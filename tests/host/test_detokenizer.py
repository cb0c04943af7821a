"""A stream's text does not depend on how many tokens a step brings: the detokenizer, and what a stop string holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from random_groups import random_groups
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dflash.host.patches import streamed_text
from sglang_dflash.serving import TINY_TARGET

TEXTS = [
    "你好😊🎉，再见👋😄😄😄",
    "你好🙂🙃🙂🙃 再见👍🏻👍🏻 了",
    'plain words, then 好😊 and naïve café\n{"a": "é😄"}\n',
    "a \ufffd in the text itself, 😊",
    "👩‍👩‍👧‍👦 family",
]
SPLITS = 100
printable_in_sglang = detokenizer_manager.find_printable_text


def byte_level() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY_TARGET)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words start with a space, and what the vocabulary lacks comes as bytes, as in tokenizers of SentencePiece."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {letter: 257 + number for number, letter in enumerate(["▁", *map(chr, range(97, 123)), "好"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def streamed(tokenizer: PreTrainedTokenizerFast, prompt: list[int], steps: list[list[int]]) -> list[str]:
    """The text that SGLang's detokenizer sends for each step."""
    manager = DetokenizerManager.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size, manager.decode_status = tokenizer, len(tokenizer), {}
    manager.disable_tokenizer_batch_decode = False
    sent = []
    for number, step in enumerate(steps):
        out: Any = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[prompt + step if number == 0 else step],
            read_offsets=[len(prompt)],
            finished_reasons=[{"type": "length"} if number == len(steps) - 1 else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        sent += manager._decode_batch_token_id_output(out)
    return sent


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_text, "serves_dflash", lambda: True)
    monkeypatch.setattr(
        detokenizer_manager,
        "find_printable_text",
        lambda text: streamed_text.printable_text(printable_in_sglang, text),
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_any_steps_bring_the_whole_text(make: Any, text: str, hooked: None) -> None:
    """Fails where a character is repeated, lost or changed because a step ends inside it."""
    tokenizer = make()
    prompt, ids = tokenizer("hello", add_special_tokens=False)["input_ids"], tokenizer.encode(text)
    whole = "".join(streamed(tokenizer, prompt, [[token] for token in ids]))
    assert whole.strip() == text.strip()
    for steps in random_groups(ids, text, SPLITS):
        assert "".join(streamed(tokenizer, prompt, steps)) == whole, steps


def test_without_the_hook_characters_are_repeated() -> None:
    """Fails where SGLang's detokenizer no longer needs the hook."""
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXTS[0])
    assert any("".join(streamed(tokenizer, [5], steps)) != TEXTS[0] for steps in random_groups(ids, TEXTS[0], SPLITS))


@pytest.mark.parametrize(
    ("said", "holds"), [("", False), ("ab 再", True), ("ab 再见", True), ("再见你", False), ("a", False), ("见", False)]
)
@pytest.mark.parametrize("cut", [0, 1])
def test_what_may_begin_a_stop_is_held(said: str, holds: bool, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the first characters of a stop string are sent, also where the next character is incomplete."""
    monkeypatch.setattr(streamed_text, "serves_dflash", lambda: True)
    tokenizer = byte_level()
    request: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(stop_strs=["再见👋"], stop_regex_strs=[]),
        tokenizer=tokenizer,
        output_ids=[*tokenizer.encode(said), *tokenizer.encode("👋")[:cut]],
    )
    assert streamed_text.may_begin_a_stop(lambda _: False, request) is holds
