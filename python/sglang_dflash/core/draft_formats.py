"""Reads the layouts in which drafts are published and says each in z-lab's plain keys, the only ones that we read.

Sources: vllm-project/speculators (models/dflash), DeepSeek's DeepSpec (modeling/dflash), NVIDIA NeMo Automodel
(train_dflash.py) and Model-Optimizer (hf_spec_export.py), hao-ai-lab/JetSpec (draft_head.py), z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PLAIN_ARCHITECTURE = "DFlashDraftModel"
ZLAB, SPECULATORS, DEEPSPEC, NEMO, MODELOPT, JETSPEC = (
    "z-lab",
    "speculators",
    "DeepSpec",
    "NeMo Automodel",
    "ModelOpt",
    "JetSpec",
)
SPECULATORS_KEY = "speculators_model_type"
DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
NEMO_ARCHITECTURES = {"Qwen3DFlashDraftModel": PLAIN_ARCHITECTURE, "Qwen3DFlash2DraftModel": "DFlash2DraftModel"}
EMBEDDING = -1
"""The tap of the target's embedding: what enters its first layer. Tap i is the output of layer i."""
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")
"""Of `dflash_config`; plain is `is_causal` at the top level."""
NOT_PLAIN = frozenset((SPECULATORS_KEY, "transformer_layer_config", "aux_hidden_state_layer_ids", "speculators_config"))
"""Keys at the top level that only a config of speculators may have."""
TARGETS_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")

READ = (
    *("attention_sink_bias", "attention_value_scale", "block_size", *CAUSAL_KEYS, "conv_group_size"),
    *("conv_kernel_size", "emb_dim", "final_logit_softcapping", "gru_hidden_dim", "mask_token", "mask_token_id"),
    *("output_multiplier", "projector_type", "pure_draft_prefix_len", "sample_from_anchor", "selector_rank"),
    *("selector_top_k", "shift_label", "swa_window_size", "target_layer_ids", "use_swa"),
)
"""Keys of `dflash_config` that we or SGLang 0.5.23 read."""
REFUSED_ELSEWHERE = ("enable_confidence_head", "markov_rank", "use_gemma_norm")
"""Keys that end the start with a sentence of their own, if they ask for anything."""
INERT = {
    "backbone_rotary_base": "XiaomiMiMo",
    "confidence_head_alpha": "SpecForge",
    "confidence_head_with_markov": "DeepSpec",
    "loss_decay_gamma": "XiaomiMiMo",
    "markov_head_type": "DeepSpec",
    "num_anchors": "XiaomiMiMo",
    "num_hidden_layers": "MiniMax",
    "num_target_layers": "z-lab",
}
"""Keys that change nothing in serving, and a trainer that writes them."""
ONLY = {
    "attention_mode": ("gqa", "mha"),
    "input_embedding_scale": (1.0,),
    "use_aux_hidden_state": (True,),
    "use_confidence_head": (False,),
}
"""Keys that we know in these values alone, which change nothing."""


class Published(NamedTuple):
    """A draft's config as published.

    Fields:
        config: with z-lab's plain keys; equal to what was published, if that is plain.
        layout: who writes such a config.
    """

    config: dict[str, Any]
    layout: str


def read_published(config: Mapping[str, Any]) -> Published:
    """Says any published layout in plain keys. A config in plain keys comes back as it is.

    Raises:
        ValueError: one sentence with the key, its value and what is allowed.
    """
    dflash = config.get("dflash_config") or {}
    if not isinstance(dflash, Mapping):
        raise ValueError(f"dflash_config is {dflash!r}; it must be an object.")
    plain, dflash, layout = dict(config), dict(dflash), ZLAB
    architectures = config.get("architectures") or []
    if config.get(SPECULATORS_KEY) is not None:
        plain, dflash = _from_speculators(config)
        layout = SPECULATORS
    elif architectures == [DEEPSPEC_ARCHITECTURE] and config.get("markov_rank") == 0:
        plain, dflash = _from_deepspec(plain, dflash)
        layout = DEEPSPEC
    elif len(architectures) == 1 and architectures[0] in NEMO_ARCHITECTURES:
        plain = _without_targets_rope(plain) | {"architectures": [NEMO_ARCHITECTURES[architectures[0]]]}
        if dflash.get("causal") and plain.get("is_causal") is False:
            del plain["is_causal"]  # train_jetspec.py leaves it there and trains causally
        layout = NEMO
    elif dflash.get("causal_head") is not None:
        layout = JETSPEC
    elif "causal" in dflash or "use_swa" in dflash:
        layout = MODELOPT
    _check_keys(plain, dflash)
    _drop_wrong_count(plain, dflash)
    _say_windows(plain, dflash)
    _say_causality(plain, dflash)
    if plain.get("attention_sink_bias") is not None and plain["attention_sink_bias"] == dflash.get(
        "attention_sink_bias"
    ):
        del plain["attention_sink_bias"]  # ModelOpt writes it at both levels
    if dflash:
        plain["dflash_config"] = dflash
    return Published(plain, layout)


def _from_speculators(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    kind, inner = config[SPECULATORS_KEY], config.get("transformer_layer_config")
    if kind != "dflash":
        raise ValueError(f"The draft's {SPECULATORS_KEY} is {kind!r}; of speculators' drafts we serve 'dflash'.")
    if not isinstance(inner, Mapping):
        raise ValueError(f"The draft's transformer_layer_config is {inner!r}; it must be an object.")
    plain = {**config, **{key: value for key, value in inner.items() if value is not None}}
    for key in ("layer_types", "sliding_window", "use_sliding_window"):
        outer, nested = config.get(key), inner.get(key)
        if outer is not None and nested is not None and outer != nested:
            raise ValueError(
                f"The draft's {key} is {outer!r} and transformer_layer_config's {nested!r}: they must agree."
            )
    layers = config.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"The draft's aux_hidden_state_layer_ids is {layers!r}; it must be a list of layer numbers.")
    wide = config.get("target_hidden_size")
    if wide is not None and wide != plain.get("hidden_size"):
        raise ValueError(
            f"The draft's target_hidden_size is {wide} and its hidden_size {plain.get('hidden_size')}: "
            "we serve drafts where they are equal."
        )
    heads, hidden = plain.get("num_attention_heads"), plain.get("hidden_size")
    if inner.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
        plain["head_dim"] = hidden // heads  # as the nested config's class has it, Llama's up to version 0.6
    if "sliding_attention" in (plain.get("layer_types") or []):
        plain["use_sliding_window"] = True
        if config.get("sliding_window_non_causal"):
            plain["is_causal"] = False  # else sliding layers are causal and full ones are not, as in z-lab's layout
    if "rope_theta" not in plain and not plain.get("rope_parameters"):
        plain["rope_theta"] = 10000.0  # of transformers' Llama, whatever the target has
    verifier = str((config.get("speculators_config") or {}).get("verifier"))
    if "gemma" in verifier.lower():
        raise ValueError(
            "The draft is speculators' for a Gemma target, whose embedding it reads unscaled; SGLang scales it, so it "
            "is not served."
        )
    plain = _without_targets_rope(plain) | {"architectures": [PLAIN_ARCHITECTURE], "model_type": "qwen3"}
    dflash = {"target_layer_ids": [layer - 1 for layer in sorted(layers)], "mask_token_id": config.get("mask_token_id")}
    if config.get("sample_from_anchor"):
        dflash["sample_from_anchor"] = True
    for key in NOT_PLAIN:
        plain.pop(key, None)
    return plain, dflash


def _from_deepspec(plain: dict[str, Any], dflash: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the target's config with the draft's keys in it."""
    plain = _without_targets_rope(plain) | {"architectures": [PLAIN_ARCHITECTURE], "model_type": "qwen3"}
    for key in ("target_layer_ids", "mask_token_id"):
        dflash.setdefault(key, plain.pop(key, None))
    return plain, dflash | {"sample_from_anchor": True}


def _without_targets_rope(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that were copied from the target's config: the draft turns the full head by one kind of position."""
    kept, rope = {key: value for key, value in plain.items() if key not in TARGETS_ROPE}, plain.get("rope_parameters")
    if isinstance(rope, Mapping):
        kept["rope_parameters"] = {key: value for key, value in rope.items() if key not in TARGETS_ROPE}
    return kept


def _check_keys(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    known = {*READ, *INERT, *ONLY, *REFUSED_ELSEWHERE}
    for key, value in dflash.items():
        if value is None or key.startswith("lilicorr"):
            continue
        if key not in known and (key, value) != ("target_hidden_size", config.get("hidden_size")):
            raise ValueError(
                f"dflash_config has {key}={value!r}, which we do not know, so this draft might not be served as it was "
                f"trained; known: {', '.join(READ)}. If it changes nothing in serving, remove it in a copy of "
                "config.json."
            )
        if value not in ONLY.get(key, (value,)):
            allowed = " or ".join(map(repr, ONLY[key]))
            raise ValueError(f"dflash_config has {key}={value!r}; we serve drafts where it is {allowed}, or absent.")
    layers = dflash.get("num_hidden_layers")
    if layers is not None and layers != config.get("num_hidden_layers"):
        raise ValueError(
            f"The draft's num_hidden_layers is {config.get('num_hidden_layers')!r} and dflash_config's is {layers!r}: "
            "they must agree."
        )


def _drop_wrong_count(config: dict[str, Any], dflash: dict[str, Any]) -> None:
    """Offline training may write a `num_target_layers` that the taps contradict (ModelOpt)."""
    taps = dflash.get("target_layer_ids", config.get("target_layer_ids"))
    highest = max((tap for tap in taps if type(tap) is int), default=0) if isinstance(taps, list) else 0
    for level in (config, dflash):
        count = level.get("num_target_layers")
        if type(count) is int and count <= highest:
            del level["num_target_layers"]


def _say_windows(config: dict[str, Any], dflash: dict[str, Any]) -> None:
    """`use_swa` gives all layers a window (ModelOpt, XiaomiMiMo)."""
    asked, size = dflash.pop("use_swa", None), dflash.pop("swa_window_size", None)
    if asked is not None and type(asked) is not bool:
        raise ValueError(f"dflash_config.use_swa is {asked!r}; it must be true, false or absent.")
    if not asked:
        return
    window = config.get("sliding_window")
    size = window if size is None else size
    if window is not None and window != size:
        raise ValueError(
            f"The draft's sliding_window is {window!r} and dflash_config.swa_window_size {size!r}: they must agree."
        )
    types = config.get("layer_types") or []
    if "sliding_attention" in types and "full_attention" in types:
        raise ValueError(
            f"dflash_config.use_swa gives all layers a window, and the draft's layer_types is {types}: they must agree."
        )
    layers = config.get("num_hidden_layers")
    config |= {"sliding_window": size, "use_sliding_window": True}
    config["layer_types"] = ["sliding_attention"] * (layers if type(layers) is int else 0)
    if config.get("is_causal") is None and all(dflash.get(key) is None for key in CAUSAL_KEYS):
        config["is_causal"] = False  # the default of those who write `use_swa`


def _say_causality(config: dict[str, Any], dflash: dict[str, Any]) -> None:
    said = {"is_causal": config.get("is_causal")}
    said |= {f"dflash_config.{key}": dflash.pop(key, None) for key in CAUSAL_KEYS}
    found = {key: value for key, value in said.items() if value is not None}
    for key, value in found.items():
        if type(value) is not bool:
            raise ValueError(f"The draft's {key} is {value!r}; it must be true, false or absent.")
    if len(set(found.values())) > 1:
        listed = " and ".join(f"{key} {str(value).lower()}" for key, value in found.items())
        raise ValueError(f"The draft's config says {listed}: they must agree.")
    if found:
        config["is_causal"] = next(iter(found.values()))
