"""A processor of images in the form of the one in published checkpoints of Kimi K2.5, which SGLang takes from there."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

SIDE = 64  # patches
MEDIA = {
    "patch_size": 8,
    "merge_kernel_size": 2,
    "in_patch_limit": 1024,
    "patch_limit_on_one_side": SIDE,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


class MediaProcessor(Kimi_K25ImageProcessor):
    """Patches of images, and how many tokens stand for one."""

    media_proc_cfg = MEDIA

    def __init__(self) -> None:
        super().__init__(
            patch_size=MEDIA["patch_size"],
            merge_size=MEDIA["merge_kernel_size"],
            max_patches=MEDIA["in_patch_limit"],
            size={"max_height": SIDE, "max_width": SIDE},
            image_mean=MEDIA["image_mean"],
            image_std=MEDIA["image_std"],
        )

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        grid = self([media["image"]], return_tensors="pt")["image_grid_thw"]
        return int(grid.prod()) // MEDIA["merge_kernel_size"] ** 2


class KimiK25Processor:
    """Text and images ("medias") to token ids, patches and grids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = self.media_processor = MediaProcessor()

    @classmethod
    def from_pretrained(cls, path: str, **_: Any) -> KimiK25Processor:
        return cls(AutoTokenizer.from_pretrained(path))

    @classmethod
    def register_for_auto_class(cls, *_: Any) -> None:
        """transformers calls it after the import."""

    def __call__(self, text: list[str], medias: list[dict[str, Any]] | None = None, **_: Any) -> dict[str, Any]:
        encoded = dict(self.tokenizer(text, return_tensors="pt"))
        if medias:
            images = self.media_processor([media["image"] for media in medias], return_tensors="pt")
            encoded |= {"pixel_values": images["pixel_values"], "grid_thws": images["image_grid_thw"]}
        return encoded
