"""Starts, queries and stops a server process: for the quickstart, the checker, tests and benchmarks."""

from sglang_dflash.serving.client import Answer, Client
from sglang_dflash.serving.server import Server, ServerError
from sglang_dflash.serving.tiny_pair import (
    KINDS,
    PAIRS,
    TINY_DRAFT,
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    TINY_TARGET,
    HeldOutPrompt,
    held_out_prompts,
    held_out_prompts_in_turn,
)

__all__ = [
    "KINDS",
    "PAIRS",
    "TINY_DRAFT",
    "TINY_ENVIRONMENT",
    "TINY_OVERLAPPING",
    "TINY_TARGET",
    "Answer",
    "Client",
    "HeldOutPrompt",
    "Server",
    "ServerError",
    "held_out_prompts",
    "held_out_prompts_in_turn",
]
