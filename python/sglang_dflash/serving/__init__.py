"""The only client of a running server: starts servers, asks them, reads their replies, judges ties, shows progress."""

from sglang_dflash.serving.arms import Arm
from sglang_dflash.serving.client import Client, greedy_body, with_best
from sglang_dflash.serving.completion import AcceptanceStats, Completion
from sglang_dflash.serving.errors import ServerError, exit_code, last_error, sentence
from sglang_dflash.serving.info import ServerInfo, row_counts
from sglang_dflash.serving.progress import Progress
from sglang_dflash.serving.server import Server
from sglang_dflash.serving.ties import TiePolicy, differs_at
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
    "AcceptanceStats",
    "Arm",
    "Client",
    "Completion",
    "HeldOutPrompt",
    "Progress",
    "Server",
    "ServerError",
    "ServerInfo",
    "TiePolicy",
    "differs_at",
    "exit_code",
    "greedy_body",
    "held_out_prompts",
    "held_out_prompts_in_turn",
    "last_error",
    "row_counts",
    "sentence",
    "with_best",
]
