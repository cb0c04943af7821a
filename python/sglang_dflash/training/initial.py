"""The draft that a run starts from: random weights, another draft's, or layers of the target itself."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from sglang_dflash.reference import DFlashDraftModel, decoder_layers
from sglang_dflash.training.conversations import seen_ids
from sglang_dflash.training.data import Data
from sglang_dflash.training.frozen import FrozenTarget, mask_token_id
from sglang_dflash.training.layout import new_config, with_dflash2_head
from sglang_dflash.training.options import OF_TARGET, TrainOptions


def first_draft(options: TrainOptions, target: FrozenTarget, data: Data) -> DFlashDraftModel:
    """The draft before the first step, in float32.

    Raises:
        ValueError: --init, or the flags of a new draft, do not fit the target.
    """
    if options.init not in (None, OF_TARGET):
        return _continued(options, target)
    seen = {*seen_ids(*data.all()), *target.end_ids} if options.mask_token_id == "auto" else set()
    mask_id = mask_token_id(target.tokenizer, target.config.vocab_size, options.mask_token_id, seen)
    draft = DFlashDraftModel(new_config(target.config, options, mask_id)).float()
    if options.init == OF_TARGET:
        copy_target(draft, target.model)
    else:
        copy_last_norm(draft, target.model)
    return draft


def _continued(options: TrainOptions, target: FrozenTarget) -> DFlashDraftModel:
    try:
        draft = DFlashDraftModel.from_pretrained(options.init, dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"--init {options.init} cannot be loaded: {str(error).splitlines()[0]}") from None
    draft.own_head, draft.config.draft_vocab_size = None, None  # speculators' heads are rows of the target's
    if draft.mask_embedding is not None or draft.draft_config.attention_sinks:
        raise ValueError(
            f"--init {options.init} has a mask embedding of its own or attention sinks, which are not trained here."
        )
    if draft.draft_config.domino is not None:
        raise ValueError(f"--init {options.init} is a Domino draft; allowed: a DFlash or a DFlash2 draft.")
    config = target.config
    if options.head == "dflash2" and draft.draft_config.selector is None:
        draft = with_dflash2_head(draft, config.vocab_size, options)
    draft.draft_config.check_target(config.num_hidden_layers, config.hidden_size, config.vocab_size)
    return draft


@torch.no_grad()
def copy_last_norm(draft: DFlashDraftModel, target: nn.Module) -> None:
    """Gives the draft the target's final norm, because it has the target's head: with weights of one, the first losses
    of SmolLM2-135M are 40 nats instead of 11."""
    norm = getattr(target.get_decoder(), "norm", None)
    if norm is not None and _computes_alike(draft.norm, norm):
        draft.norm.weight.copy_(norm.weight)


@torch.no_grad()
def copy_target(draft: DFlashDraftModel, target: nn.Module) -> None:
    """Gives the draft the target's last layers and final norm; the context is the last tap alone.

    Raises:
        ValueError: the target has too few layers, or they are not built as the draft's are.
    """
    layers, norm = decoder_layers(target), getattr(target.get_decoder(), "norm", None)
    if len(layers) < len(draft.layers):
        raise ValueError(f"--init target: the target has {len(layers)} layers; --layers is {len(draft.layers)}.")
    for own, its in zip(draft.layers, layers[-len(draft.layers) :], strict=True):
        given, wanted = its.state_dict(), own.state_dict()
        optional = {name for name in wanted if name.startswith(_NEW)}
        other = (wanted.keys() - given.keys() - optional) | (given.keys() - wanted.keys())
        other |= {name for name in wanted.keys() & given.keys() if wanted[name].shape != given[name].shape}
        parts = ("input_layernorm", "mlp")
        alike = not other and all(_computes_alike(getattr(own, part), getattr(its, part)) for part in parts)
        if norm is None or not alike:
            where = f" ({min(other)})" if other else ""
            raise ValueError(f"--init target: the target's layers are not built as Llama's or Qwen3's are{where}.")
        own.load_state_dict(given, strict=False)
    hidden = draft.config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -hidden:] = torch.eye(hidden)
    draft.hidden_norm.weight.copy_(layers[-len(draft.layers)].input_layernorm.weight)
    draft.norm.weight.copy_(norm.weight)


_NEW = ("self_attn.q_norm.", "self_attn.k_norm.", "attention_conv.", "mlp_conv.")  # the draft's, and not every target's


def _computes_alike(own: nn.Module, its: nn.Module) -> bool:
    """Whether a module of the draft, with the weights of the target's, computes the same. Names and shapes do not tell:
    some families' norms multiply by 1 + weight."""
    given = its.state_dict()
    if {name: weight.shape for name, weight in own.state_dict().items()} != {n: w.shape for n, w in given.items()}:
        return False
    weight = next(its.parameters())
    tried, exact = deepcopy(own).to(weight.device), deepcopy(its).float()  # bfloat16 differs by its rounding alone
    tried.load_state_dict(given)
    x = torch.randn(4, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    return torch.allclose(tried(x), exact(x), rtol=1e-3, atol=1e-3)
