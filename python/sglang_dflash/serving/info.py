"""What a running SGLang server says of itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sglang_dflash.core.policy import StepSeconds
from sglang_dflash.core.row_counts import PREFILLED, SECONDS, STATE, RowCounts
from sglang_dflash.serving.errors import ServerError, first_line

if TYPE_CHECKING:
    from sglang_dflash.serving.client import Client


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's models and settings.

    Fields:
        dtype: the model's compute dtype; bfloat16 where the server only says auto.
        algorithm: of speculation, "" where it is off.
        block_size: rows of a block; 0 where speculation is off.
        max_prompt_len: the longest prompt it takes.
        chunk: tokens of a prompt that one prefill takes at most; 0: all.
        own_worker: whether this package's worker serves.
    """

    model_path: str
    version: str
    dtype: str
    algorithm: str
    draft_path: str
    block_size: int
    overlap: bool
    deterministic: bool
    max_prompt_len: int
    chunk: int = 0
    own_worker: bool = False

    @classmethod
    def ask(cls, client: Client) -> ServerInfo:
        """
        Raises:
            ServerError: no SGLang server answers there.
        """
        try:
            info = _server_info(client)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"No SGLang server answers at {client.url}: {first_line(error)}") from None
        return cls(
            model_path=info.get("model_path", ""),
            version=info.get("version", ""),
            dtype=_compute_dtype(info),
            algorithm=info.get("speculative_algorithm") or "",
            draft_path=info.get("speculative_draft_model_path") or "",
            block_size=info.get("speculative_num_draft_tokens") or 0,
            overlap=not info.get("disable_overlap_schedule"),
            deterministic=bool(info.get("enable_deterministic_inference")),
            max_prompt_len=info.get("max_req_input_len") or 0,
            chunk=max(0, info.get("chunked_prefill_size") or 0),
            own_worker=any(PREFILLED in state for state in info.get("internal_states") or []),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row_counts(client: Client) -> RowCounts | None:
    """What the server's steps have verified since its start, over all replicas; None where all verify the same rows, or
    where another version counts other things."""
    states = _server_info(client).get("internal_states") or []
    parts = [state[STATE] for state in states if STATE in state]
    try:
        return RowCounts.total(parts) if parts else None
    except TypeError:
        return None


def step_seconds(client: Client) -> StepSeconds | None:
    """How long steps of one request take; None where the server does not time both kinds, or has not yet."""
    states = _server_info(client).get("internal_states") or []
    found = next((state[SECONDS] for state in states if SECONDS in state), None)
    try:
        return None if found is None else StepSeconds(**found)
    except TypeError:  # another version's
        return None


def detect_engine(url: str) -> str:
    """The engine that answers at `url`, recognized by its endpoints: sglang, vllm or other."""
    for engine, path in (("sglang", "/server_info"), ("vllm", "/version")):
        try:
            if httpx.get(f"{url}{path}", timeout=10.0).status_code == 200:
                return engine
        except (httpx.HTTPError, httpx.InvalidURL):
            return "other"
    return "other"


def _server_info(client: Client) -> dict[str, Any]:
    try:
        return client.get("/server_info")
    except httpx.HTTPStatusError:
        return client.get("/get_server_info")  # releases before 0.5.4


def _compute_dtype(info: dict[str, Any]) -> str:
    names = {"half": "float16", "float": "float32"}
    dtype = info.get("dtype") or "auto"
    if dtype != "auto":
        return names.get(dtype, dtype)
    config = Path(info.get("model_path", "")) / "config.json"
    said = json.loads(config.read_text()) if config.is_file() else {}
    stored = said.get("dtype") or said.get("torch_dtype") or "float32"
    # The host computes float32 checkpoints in float16 (Gemma: bfloat16) unless --dtype says otherwise.
    half = "bfloat16" if said.get("model_type", "gemma").startswith("gemma") else "float16"
    return half if stored == "float32" else stored
