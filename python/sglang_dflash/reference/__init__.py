"""The DFlash draft in Hugging Face form, with `spec_generate`: usable alone, and compared with in tests."""

from sglang_dflash.core.draft_config import PLAIN_ARCHITECTURE, LayerAttention, build_target_layer_ids
from sglang_dflash.core.draft_heads import DFLASH2_ARCHITECTURES
from sglang_dflash.reference.config import DFlashConfig
from sglang_dflash.reference.dflash2 import CandidateSelector
from sglang_dflash.reference.generation import Generation, spec_generate
from sglang_dflash.reference.modeling import Attend, DFlashDraftModel, block_mask
from sglang_dflash.reference.target import FeatureTaps, decoder_layers, end_token_ids, text_config

__all__ = [
    "DFLASH2_ARCHITECTURES",
    "PLAIN_ARCHITECTURE",
    "Attend",
    "CandidateSelector",
    "DFlashConfig",
    "DFlashDraftModel",
    "FeatureTaps",
    "Generation",
    "LayerAttention",
    "block_mask",
    "build_target_layer_ids",
    "decoder_layers",
    "end_token_ids",
    "spec_generate",
    "text_config",
]
