"""The byte-level BPE tokenizer of the pair: trained here, saved so that AutoTokenizer loads it."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)
# Tools, calls and results look as `sglang_dflash.workloads.script` writes them. A result is a user's message.
CHAT_TEMPLATE = """\
{%- if tools and messages[0]['role'] != 'system' %}
    {%- set messages = [{'role': 'system', 'content': ''}] + messages %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\\n' }}
    {%- if message['role'] == 'tool' %}
        {{- '<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- else %}
        {%- set said = message['content'] or '' %}
        {{- said.rstrip('\\n') if message['tool_calls'] else said }}
    {%- endif %}
    {%- if tools and loop.first %}
        {{- ('\\n' if message['content'] else '') + 'Tools:' }}
        {%- for tool in tools %}
            {%- set named = tool.function or tool %}
            {{- '\\n- ' + named.name + '(' + (named.parameters.properties or {}) | join(', ') + ')' }}
            {{- ': ' + named.description if named.description else '' }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- set given = call.function.arguments %}
        {{- '\\n' if message['content'] or not loop.first else '' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- given if given is string else given | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# Qwen's word pattern: each digit is a separate piece.
_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` entries; the last four are the special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(added)
    assert tokenizer.get_vocab_size() == vocab_size, (tokenizer.get_vocab_size(), vocab_size)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    _write_settings(folder, settings)


def save_chat_template(folder: Path) -> None:
    """Gives today's chat template to a saved tokenizer."""
    _write_settings(folder, json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")))


def _write_settings(folder: Path, settings: dict[str, object]) -> None:
    settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the saved tokenizer and checks that different kinds of text survive the round trip."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in (
        "12 + 30 = 42.\n",
        "def f(x):\n    return x\n",
        " Grüße, 世界 🙂\t\r\n  end ",
        "'tis\u00a0\x00",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, (text, ids)
    return tokenizer
