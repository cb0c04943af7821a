"""The engines of `sglang-dflash generate`: each answers with a pair's drafts, and as the target alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.serving import sentence

Put = Callable[[list[int]], None]
"""Gets new ids as soon as they are committed."""


class Engine(Protocol):
    """A pair of models.

    Fields:
        dtype: of the target, as torch names it.
        device: cpu, cuda or gpu.
    """

    dtype: str
    device: str

    def speculate(self, prompt: list[int], limit: int, temperature: float, put: Put) -> list[int]:
        """Answers with drafts, in at most `limit` tokens; returns the commit_len of every step."""

    def plain(self, prompt: list[int], limit: int, put: Put) -> None:
        """Answers greedily without drafts, in the engine's own loop."""

    def gap(self, ids: list[int]) -> float:
        """By how much the target's two best logits differ behind these ids."""


class TransformersEngine:
    """`spec_generate` over a target of transformers."""

    def __init__(self, target: str, draft: str, tokenizer: Any, dtype: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from sglang_dflash.reference import DFlashDraftModel

        disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        asked = dtype or ("float32" if self.device == "cpu" else "auto")
        self._draft = DFlashDraftModel.from_pretrained(draft, dtype=asked).to(self.device).eval()
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=asked).to(self.device).eval()
        self._mask_token_id = _mask_token_id(self._draft.draft_config, tokenizer)
        self.dtype = str(self._target.dtype).removeprefix("torch.")

    def speculate(self, prompt: list[int], limit: int, temperature: float, put: Put) -> list[int]:
        answer = self._draft.spec_generate(
            self._target,
            self._tensor(prompt),
            limit,
            temperature=temperature,
            mask_token_id=self._mask_token_id,
            streamer=_Streamer(put),
            return_stats=True,
        )
        return list(answer.commit_lens[0])

    def plain(self, prompt: list[int], limit: int, put: Put) -> None:
        ids = self._tensor(prompt)
        # Without 1.0, transformers takes the checkpoint's own penalty, which `spec_generate` does not apply.
        greedy = {"do_sample": False, "repetition_penalty": 1.0}
        self._target.generate(
            ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=limit, streamer=_Streamer(put), **greedy
        )

    def gap(self, ids: list[int]) -> float:
        import torch

        with torch.inference_mode():
            best = self._target(self._tensor(ids)).logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])

    def _tensor(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self.device)


class _Streamer:
    """What transformers hands new ids to; the prompt comes first and is dropped."""

    def __init__(self, put: Put) -> None:
        self._put, self._answers = put, False

    def put(self, ids: Any) -> None:
        if self._answers:
            self._put(ids.flatten().tolist())
        self._answers = True

    def end(self) -> None:
        pass


class MlxEngine:
    """`stream_generate` over a target of mlx-lm."""

    def __init__(self, target: str, draft: str, tokenizer: Any, dtype: str | None) -> None:
        try:
            import mlx.core as mx
            import mlx_lm

            from sglang_dflash.reference import mlx
        except ImportError as error:
            raise ValueError(
                f"--engine mlx needs mlx and mlx-lm, which cannot be imported ({sentence(error)}); run: "
                "pip install 'sglang-dflash[mlx]'"
            ) from None
        self._mx, self._mlx_lm, self._mlx = mx, mlx_lm, mlx
        self.device = mx.default_device().type.name
        asked = dtype or ("float32" if self.device == "cpu" else None)
        wanted = None if asked is None else getattr(mx, asked)
        self._draft = mlx.load_draft(draft, wanted)
        self._target, self._tokenizer = mlx.load_target(target, wanted)
        self._mask_token_id = _mask_token_id(self._draft.draft_config, tokenizer)
        self.dtype = str(self._target.model.norm.weight.dtype).removeprefix("mlx.core.")

    def speculate(self, prompt: list[int], limit: int, temperature: float, put: Put) -> list[int]:
        sampler = self._mlx_lm.sample_utils.make_sampler(temperature)
        commit_lens = []
        for step in self._mlx.stream_generate(
            self._target,
            self._draft,
            self._tokenizer,
            prompt,
            limit,
            sampler=sampler,
            mask_token_id=self._mask_token_id,
        ):
            put(step.ids)
            commit_lens.append(step.commit_len)
        return commit_lens[1:]  # the prefill comes first

    def plain(self, prompt: list[int], limit: int, put: Put) -> None:
        for one in self._mlx_lm.stream_generate(self._target, self._tokenizer, prompt, max_tokens=limit):
            put([one.token])

    def gap(self, ids: list[int]) -> float:
        logits = self._target(self._mx.array([ids]))[0, -1].astype(self._mx.float32)
        second, first = self._mx.sort(logits)[-2:].tolist()
        return first - second


ENGINES = {"transformers": TransformersEngine, "mlx": MlxEngine}


def _mask_token_id(draft: DraftConfig, tokenizer: Any) -> int | None:
    """The mask's id; None if the config has only a text that is no token, which the engines refuse."""
    return tokenizer.get_vocab().get(draft.mask_token) if draft.mask_token_id is None else draft.mask_token_id
