"""What follows the load of a model's weights on a CPU."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.ops import huge_pages

logger = logging.getLogger(__name__)


def move_weights(model: Any) -> None:
    """To huge pages; where there are none, or not enough of them, the model is served all the same, and slower."""
    page = huge_pages.page_bytes()
    if page is None:
        return
    name = type(model).__name__
    try:
        moved, huge = huge_pages.move(model.parameters(), page)
    except OSError as error:
        logger.warning("%s's weights stay on small pages, and are read slower: %s.", name, error)
        return
    level = logging.WARNING if huge < moved // 2 else logging.INFO
    switch = huge_pages.VARIABLE
    message = "%.1f of the %.1f MB of %s's weights are on huge pages; %s=0 does not ask for them."
    logger.log(level, message, huge / 1e6, moved / 1e6, name, switch)
