"""The arms of a sweep: which process serves each, with which arguments, and how it is reached."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_dflash.serving import Server
from sglang_dflash.serving.server import LAUNCH_SGLANG

SGLANG_ARMS = ("off", "dflash", "builtin", "eagle3", "standalone", "ngram")
VLLM_ARMS = ("vllm", "vllm-off")
ARMS = (*SGLANG_ARMS, "transformers", *VLLM_ARMS)


@dataclass(frozen=True, slots=True)
class Models:
    """Where the models are.

    Fields:
        drafts: by arm: dflash, eagle3, standalone.
        draft_tokens: rows of a block where that is not the checkpoint's own number.
        block_size: rows of a block; 0 where no arm needs a DFlash draft.
    """

    target: str
    drafts: dict[str, str]
    draft_tokens: int | None
    block_size: int


@dataclass(frozen=True, slots=True)
class Arm:
    """One server of a sweep: an arm with its attention backend and prefix cache.

    Fields:
        engine: sglang, vllm, transformers or other; arms of SGLang must give the same greedy tokens.
        launch, arguments: the command without host and port; empty for a server that runs already.
        url: of a server that runs already.
        simulated: its acceptance is a simulation, so that its tokens mean nothing.
    """

    name: str
    engine: str
    backend: str = ""
    radix: bool = True
    launch: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    url: str = ""

    @property
    def simulated(self) -> bool:
        return bool(self.variables.get("SGLANG_SIMULATE_ACC_LEN"))

    @property
    def variables(self) -> dict[str, str]:
        """What the server sees of SGLang's, vLLM's and OpenMP's variables, those of the shell included."""
        shell = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "VLLM_", "OMP_"))}
        return {} if self.url else {**shell, **self.environment}

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.backend, "" if self.radix else "no prefix cache")))

    @contextmanager
    def up(self, log: Path, timeout_s: float, on_wait: Callable[[float], None]) -> Iterator[tuple[str, Server | None]]:
        """Its URL, and the server where it is ours; it runs until the block is left.

        Raises:
            ServerError: it does not start.
        """
        if self.url:
            yield self.url, None
            return
        server = Server(self.arguments, log, self.environment, self.launch, self.health)
        with server.start(timeout_s, on_wait):
            yield server.url, server


@dataclass(frozen=True, slots=True)
class Serving:
    """What the servers of a sweep are started with.

    Fields:
        flags: of sglang.launch_server, for every SGLang arm.
        arm_flags, arm_environment: by arm, on top.
        environment: for all.
        backends: attention backends of SGLang; ("",): its own choice.
        radix: settings of the prefix cache, in their order.
        tp_size: of SGLang and vLLM.
        dtype: for vLLM and transformers, which have flags of their own; "" for their choice.
        device: cpu or cuda, for transformers.
    """

    flags: tuple[str, ...]
    arm_flags: dict[str, tuple[str, ...]]
    environment: dict[str, str]
    arm_environment: dict[str, dict[str, str]]
    backends: tuple[str, ...]
    radix: tuple[bool, ...]
    tp_size: int
    vllm_python: str
    dtype: str
    device: str


def arms_of(names: Sequence[str], models: Models, serving: Serving, urls: dict[str, str]) -> list[Arm]:
    """One arm per name, backend and cache setting where it has those; arms that run already come last."""
    arms: list[Arm] = []
    for name in names:
        if name in SGLANG_ARMS:
            for backend in serving.backends:
                arms += [_sglang(name, models, serving, backend, radix) for radix in serving.radix]
        elif name in VLLM_ARMS:
            arms += [_vllm(name, models, serving, radix) for radix in serving.radix]
        else:
            arms.append(_transformers(models, serving))
    return arms + [Arm(name, "other", url=url.rstrip("/")) for name, url in urls.items()]


def reference_arm(arms: Sequence[Arm]) -> Arm:
    """Whose tokens others are compared with: speculation off, else SGLang's first arm, else the first."""
    for wanted in (lambda arm: arm.name == "off", lambda arm: arm.engine == "sglang" and not arm.simulated):
        for arm in arms:
            if wanted(arm):
                return arm
    return arms[0]


def _sglang(name: str, models: Models, serving: Serving, backend: str, radix: bool) -> Arm:
    arguments = ["--model-path", models.target, "--tp-size", str(serving.tp_size), *serving.flags]
    arguments += ["--attention-backend", backend] if backend else []
    arguments += [] if radix else ["--disable-radix-cache"]
    # Said to every arm: the shell's own setting must not turn one arm into another.
    environment = {"SGLANG_DFLASH_WORKER": "builtin" if name == "builtin" else "plugin"}
    return Arm(
        name,
        "sglang",
        backend,
        radix,
        LAUNCH_SGLANG,
        (*arguments, *_speculation(name, models), *serving.arm_flags.get(name, ())),
        {**environment, **_environment(name, serving)},
        "/health_generate",
    )


def _speculation(name: str, models: Models) -> list[str]:
    if name == "off":
        return []
    algorithm = {"dflash": "DFLASH", "builtin": "DFLASH"}.get(name, name.upper())
    draft = models.drafts.get("dflash" if name == "builtin" else name)
    words = ["--speculative-algorithm", algorithm]
    words += ["--speculative-draft-model-path", draft] if draft else []
    if models.draft_tokens and algorithm == "DFLASH":
        words += ["--speculative-num-draft-tokens", str(models.draft_tokens)]
    return words


def _vllm(name: str, models: Models, serving: Serving, radix: bool) -> Arm:
    arguments = ["--model", models.target, "--tensor-parallel-size", str(serving.tp_size)]
    arguments += ["--dtype", serving.dtype] if serving.dtype else []
    arguments += ["--enable-prefix-caching" if radix else "--no-enable-prefix-caching"]
    arguments += ["--enable-prompt-tokens-details"]
    if name == "vllm":
        draft = {"method": "dflash", "model": models.drafts["dflash"]}
        # vLLM counts the drafts of a block, SGLang its rows, the bonus token's included.
        arguments += ["--speculative-config", json.dumps({**draft, "num_speculative_tokens": models.block_size - 1})]
    # Its door to empty the prefix cache stands open in this mode alone.
    environment = {"VLLM_SERVER_DEV_MODE": "1", **_environment(name, serving)}
    launch = (serving.vllm_python, "-m", "vllm.entrypoints.openai.api_server")
    return Arm(name, "vllm", "", radix, launch, (*arguments, *serving.arm_flags.get(name, ())), environment)


def _transformers(models: Models, serving: Serving) -> Arm:
    arguments = ["--target", models.target, "--draft", models.drafts["dflash"], "--device", serving.device]
    arguments += ["--dtype", serving.dtype] if serving.dtype else []
    arguments += ["--block-size", str(models.draft_tokens)] if models.draft_tokens else []
    launch = (sys.executable, "-m", "sglang_dflash.bench.transformers_worker")
    return Arm(
        "transformers", "transformers", "", True, launch, tuple(arguments), _environment("transformers", serving)
    )


def _environment(name: str, serving: Serving) -> dict[str, str]:
    return {**serving.environment, **serving.arm_environment.get(name, {})}


def split_flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))
