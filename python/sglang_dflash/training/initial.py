"""The draft that a run starts from: random weights, another draft's, or layers of the target itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sglang_dflash.reference import DFlashDraftModel, decoder_layers
from sglang_dflash.training.frozen import FrozenTarget, mask_token_id
from sglang_dflash.training.layout import new_config, with_dflash2_head
from sglang_dflash.training.options import OF_TARGET, TrainOptions


def first_draft(options: TrainOptions, target: FrozenTarget, seen: Iterable[int]) -> DFlashDraftModel:
    """The draft before the first step, in float32.

    Args:
        seen: the token ids of the data.

    Raises:
        ValueError: --init, or the flags of a new draft, do not fit the target.
    """
    if options.init not in (None, OF_TARGET):
        return _continued(options, target)
    mask_id = mask_token_id(target.tokenizer, target.config.vocab_size, options.mask_token_id, seen)
    draft = DFlashDraftModel(new_config(target.config, options, mask_id)).float()
    if options.init == OF_TARGET:
        copy_target(draft, target.model)
    return draft


def _continued(options: TrainOptions, target: FrozenTarget) -> DFlashDraftModel:
    try:
        draft = DFlashDraftModel.from_pretrained(options.init, dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"--init {options.init} cannot be loaded: {str(error).splitlines()[0]}") from None
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
def copy_target(draft: DFlashDraftModel, target: nn.Module) -> None:
    """Gives the draft the target's last layers and final norm; the context is the last tap alone.

    Raises:
        ValueError: a layer of the target has weights of other names or shapes.
    """
    layers = decoder_layers(target)
    for own, its in zip(draft.layers, layers[-len(draft.layers) :], strict=True):
        given = its.state_dict()
        wanted = {name: weight for name, weight in own.state_dict().items() if not name.startswith(_NEW)}
        wrong = [name for name, weight in wanted.items() if name not in given or given[name].shape != weight.shape]
        if wrong:
            raise ValueError(
                f"--init target: the target's layers have no {wrong[0]} of the shape {tuple(wanted[wrong[0]].shape)}; "
                "layers as Llama's and Qwen3's can be copied."
            )
        norms = {name: given[name] for name in own.state_dict() if name in _HEAD_NORMS and name in given}
        own.load_state_dict({name: given[name] for name in wanted} | norms, strict=False)
    hidden = draft.config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -hidden:] = torch.eye(hidden)
    draft.hidden_norm.weight.copy_(layers[-len(draft.layers)].input_layernorm.weight)
    draft.norm.weight.copy_(target.get_decoder().norm.weight)


_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_NEW = (*_HEAD_NORMS, "attention_conv.", "mlp_conv.")  # in a layer of the draft, and not in every target's
