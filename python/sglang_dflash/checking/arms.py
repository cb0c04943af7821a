"""The two arms of a check: servers of its own, started in turn, or servers that run already."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.core.plan_counts import STATE, PlanCounts
from sglang_dflash.serving import Client, Server, ServerError

START_SECONDS = 1800.0  # large weights come slowly
# A server that ends at its first leaked slot says less than one that goes on: we count the slots ourselves.
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
WHOLE_BLOCKS = {"SGLANG_DFLASH_WIDTH": "full"}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What an arm says of itself.

    Fields:
        dtype: the model's compute dtype; bfloat16 where the server only says auto.
        algorithm: of speculation, "" where it is off.
        block_size: rows of a block; 0 where speculation is off.
        max_prompt_len: the longest prompt it takes.
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

    @classmethod
    def ask(cls, client: Client) -> ServerInfo:
        """
        Raises:
            ServerError: no SGLang server answers there.
        """
        try:
            info = _server_info(client)
        except (httpx.HTTPError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ServerError(f"No SGLang server answers at {client.url}: {reason}") from None
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
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _server_info(client: Client) -> dict[str, Any]:
    try:
        return client.get("/server_info")
    except httpx.HTTPStatusError:
        return client.get("/get_server_info")  # releases before 0.5.4


def plan_counts(client: Client) -> PlanCounts | None:
    """What the server's plan has done since its start, over all replicas; None where steps are not planned, or where
    another version counts other things."""
    states = _server_info(client).get("internal_states") or []
    try:
        parts = [PlanCounts.from_json(state[STATE]) for state in states if STATE in state]
    except TypeError:
        return None
    return PlanCounts.total(parts) if parts else None


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


@dataclass(frozen=True, slots=True)
class Arm:
    """How to reach one arm.

    Fields:
        name: off or on.
        arguments: of the server to start; None where `url` runs already.
        environment: of the server to start.
        may_flush: whether its radix cache may be emptied.
    """

    name: str
    arguments: list[str] | None
    url: str
    log: Path
    environment: dict[str, str]
    may_flush: bool

    @contextmanager
    def up(self, on_wait: Callable[[float], None]) -> Iterator[Client]:
        """The arm's client; a server of our own runs until the block is left.

        Raises:
            ServerError: it does not start.
        """
        if self.arguments is None:
            yield Client(self.url)
            return
        server = Server(self.arguments, self.log, {**ENVIRONMENT, **self.environment})
        with server.start(START_SECONDS, on_wait):
            yield server.client()

    def with_whole_blocks(self) -> Arm | None:
        """The same server with steps of whole blocks, which can be counted and compared; None if it runs already."""
        if self.arguments is None:
            return None
        log = self.log.with_name(f"{self.log.stem}-whole-blocks.log")
        return replace(self, log=log, environment={**self.environment, **WHOLE_BLOCKS})

    def last_words(self) -> str:
        """Why the arm's server ended, as far as its log tells."""
        return f"{self.url} does not answer any more" if self.arguments is None else last_error(self.log)


def last_error(log: Path) -> str:
    """The sentence in a server's log that tells best why it ended, and where the log is."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _names_error(line)]
    return f"{(errors or lines or ['it wrote nothing'])[-1]} (log: {log})"


def _names_error(line: str) -> bool:
    """Such as `ValueError: ...`, the last line of a traceback."""
    name, colon, _ = line.partition(":")
    return bool(colon) and name.split(".")[-1].endswith(("Error", "Exception")) and " " not in name
