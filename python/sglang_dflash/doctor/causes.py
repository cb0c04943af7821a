"""Why acceptance may be low: the causes, and in which order to look at them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sglang_dflash.doctor.findings import Cause, Finding

CAUSES: Mapping[str, Cause] = {
    one.name: one
    for one in (
        Cause(
            "mask",
            "the mask token is not the one of the training",
            "compare mask_token_id with the published config.json",
        ),
        Cause(
            "theta",
            "the draft's rope_theta or rope scaling is not that of the training",
            "compare rope_theta and rope_parameters with the published config.json, and with the target's",
        ),
        Cause(
            "weights",
            "the weights are not those of this config.json, or some are not read",
            "download the draft again, config.json and weights of one revision",
        ),
        Cause(
            "taps",
            "the draft reads other layers of the target than in training",
            "compare target_layer_ids with the published config.json: z-lab counts outputs from 0, speculators and "
            "vLLM write one more",
        ),
        Cause(
            "target",
            "the draft was trained for another target: a base model, another fine-tune, plain weights, no adapter",
            "take the draft whose card names this target, or train one: sglang-dflash train",
        ),
        Cause(
            "causal",
            "the rows of a block see each other otherwise than in training",
            'compare is_causal with the training: "is_causal": true at the top level makes all layers causal',
        ),
        Cause(
            "window",
            "the draft's sliding window is not that of the training",
            "compare layer_types, sliding_window and use_sliding_window with the published config.json; leave "
            "--speculative-draft-window-size out",
        ),
        Cause(
            "thinking",
            "the chats think, or do not, otherwise than in the draft's training",
            'send "chat_template_kwargs": {"enable_thinking": ...} as the draft\'s card says',
        ),
        Cause(
            "text",
            "the draft has not learnt this kind of text",
            "train a draft on such text: sglang-dflash train",
        ),
        Cause(
            "cache",
            "the draft's KV behind a cached prefix is not whole",
            "look at tau after a flush (--flush); --disable-radix-cache until it is mended",
        ),
    )
}
CRUSHED = ("mask", "theta", "weights", "taps", "target", "causal", "window")
"""Where hardly anything is accepted. Planted on the embedded pair, a wrong mask token left 5 % of the accepted drafts,
a rope_theta 100 times too large 11 %; of a draft that was taught to depend on it, an inverted is_causal left 6 %."""
REDUCED = ("taps", "target", "theta", "window", "causal", "mask")
"""Where a part is left. There, other taps left 56 to 88 %, a rope_theta 10 times too large 46 %, a window of 24 tokens
58 %, and 40 % where it was left out of a draft that was taught to depend on it."""
BEHIND_LONG = ("window", "theta")
"""What shows more, the longer a prompt is."""
STRONG, WEAK, MEASURED = 10.0, 1.5, 1.0
"""How many places evidence moves a cause up: a finding that likely explains it, one that possibly does, and a way of
asking that loses more. The last is little, because long chats lose more with every fault."""


def rank(usual: Sequence[str], evidence: Sequence[Finding], measured: Collection[str] = ()) -> tuple[Cause, ...]:
    """The causes, likeliest first; each with what the files say of it.

    Args:
        usual: CRUSHED or REDUCED.
        evidence: of the files; those with a cause count.
        measured: causes at which other ways of asking point; those that are not usual come first.
    """
    names = [*(name for name in measured if name not in usual), *usual]
    strong = {one.cause: one for one in evidence if one.cause in CAUSES and one.strong}
    weak = {one.cause: one for one in evidence if one.cause in CAUSES and not one.strong}
    names += [name for name in strong if name not in names]

    def place(name: str) -> float:
        up = STRONG * (name in strong) + WEAK * (name in weak) + MEASURED * (name in measured)
        return names.index(name) - up

    return tuple(_with(CAUSES[name], strong.get(name) or weak.get(name)) for name in sorted(names, key=place))


def _with(cause: Cause, finding: Finding | None) -> Cause:
    if finding is None:
        return cause
    return Cause(cause.name, f"{cause.said}: {finding.said.rstrip('.')}", finding.fix or cause.fix)
