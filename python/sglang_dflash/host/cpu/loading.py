"""Moves a model's weights to huge pages after they are loaded on a CPU."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.ops import huge_pages

logger = logging.getLogger(__name__)


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
