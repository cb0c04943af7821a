"""What a CPU does with a model after its weights are loaded: huge pages, and what SGLang forgets."""

from __future__ import annotations

import logging
from typing import Any

from sglang_cpu.ops import huge_pages

logger = logging.getLogger(__name__)


def mend_kimi_linear(model: Any) -> None:
    """What Kimi-Linear lacks in SGLang; a no-op for other models. It can go when SGLang has both.

    On a CPU, SGLang's experts leave out `routed_scaling_factor`. Most models apply it themselves there; this one does
    not, so its router's weights get it. And one product of its recurrent layers has the checkpoint's dtype, whatever
    `--dtype` says.
    """
    for module in model.modules():
        if type(module).__name__ == "KimiMoE":
            module.topk.topk_config.apply_routed_scaling_factor_on_output = True
        elif type(module).__name__ == "KimiDeltaAttention" and hasattr(module, "fused_fg_b_proj"):
            weight = module.fused_fg_b_proj.weight
            weight.data = weight.data.to(module.o_proj.weight.dtype)


def move_weights(model: Any) -> None:
    """Moves the weights to huge pages. If there are none, or too few, the model is still served, but slower."""
    page = huge_pages.page_bytes()
    if page is None:
        return
    name = type(model).__name__
    try:
        moved, huge = huge_pages.move(model.parameters(), page)
    except OSError as error:
        logger.warning("%s's weights stay on small pages, where reading them is slower: %s.", name, error)
        return
    level = logging.WARNING if huge < moved // 2 else logging.INFO
    switch = huge_pages.VARIABLE
    message = "%.1f of the %.1f MB of %s's weights are on huge pages; %s=0 leaves them on small pages."
    logger.log(level, message, huge / 1e6, moved / 1e6, name, switch)
