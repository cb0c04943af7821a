"""Arms: how the server of each one is started, with speculation off, with DFLASH, or of another engine; or its URL."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_dflash.serving.errors import last_error
from sglang_dflash.serving.server import LAUNCH_SGLANG, RunningServer, Server

SGLANG_ARMS = ("off", "dflash", "dflash-full", "builtin", "eagle3", "standalone", "ngram")
DFLASH_ARMS = ("dflash", "dflash-full", "builtin")
VLLM_ARMS = ("vllm", "vllm-off")
ARMS = (*SGLANG_ARMS, "transformers", *VLLM_ARMS)
START_S = 1800.0  # large weights come slowly
WHOLE_BLOCKS = {"SGLANG_DFLASH_WIDTH": "full"}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of some arms.

    Fields:
        drafts: draft models by arm: dflash, eagle3, standalone.
        draft_tokens: the block size that the user gave; None for the checkpoint's own.
        block_size: rows of a block; 0 if no arm needs a DFlash draft.
    """

    target: str
    drafts: dict[str, str]
    draft_tokens: int | None
    block_size: int


@dataclass(frozen=True, slots=True)
class Arm:
    """One server that is asked: how it is started, or where it runs already.

    Fields:
        engine: sglang, vllm, transformers or other; all sglang arms must give the same greedy tokens.
        backend: attention backend; "" for the engine's choice.
        radix: whether the prefix cache is on.
        launch, arguments: the command without host and port; unused if the server runs already.
        health: the path that answers 200 once the server is up.
        url: address of a server that runs already; "" to start one.
        may_flush: whether its prefix cache may be emptied.
        simulated: acceptance is simulated, so the tokens mean nothing.
    """

    name: str
    engine: str = "sglang"
    backend: str = ""
    radix: bool = True
    launch: tuple[str, ...] = LAUNCH_SGLANG
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    health: str = "/health_generate"
    url: str = ""
    may_flush: bool = True

    @property
    def simulated(self) -> bool:
        return bool(self.variables.get("SGLANG_SIMULATE_ACC_LEN"))

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the server: the shell's SGLANG_*, VLLM_* and OMP_*, and those that the arm sets."""
        shell = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "VLLM_", "OMP_"))}
        return {} if self.url else {**shell, **self.environment}

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.backend, "" if self.radix else "no prefix cache")))

    @contextmanager
    def up(self, log: Path, timeout_s: float, on_wait: Callable[[float], None]) -> Iterator[Server | RunningServer]:
        """Yields the server; one that this starts stops when the block ends.

        Raises:
            ServerError: the server does not start.
        """
        if self.url:
            yield RunningServer(self.url)
            return
        with self.server(log).start(timeout_s, on_wait) as server:
            yield server

    def server(self, log: Path) -> Server:
        """The server of an arm without a URL, not started."""
        return Server(self.arguments, log, self.environment, self.launch, self.health)

    def why_gone(self, log: Path) -> str:
        """Why the arm's server ended, as far as its log tells."""
        return RunningServer(self.url).last_words() if self.url else last_error(log)

    def with_whole_blocks(self) -> Arm | None:
        """The same server with steps of whole blocks, which can be counted and compared; None if it runs already."""
        return None if self.url else replace(self, environment={**self.environment, **WHOLE_BLOCKS})


@dataclass(frozen=True, slots=True)
class Serving:
    """How the servers of some arms are started.

    Fields:
        flags: flags of sglang.launch_server for every SGLang arm.
        arm_flags, arm_environment: additions for single arms, by name.
        environment: variables for all arms.
        backends: attention backends of SGLang; ("",) for its own choice.
        radix: prefix cache settings, in the order to run.
        tp_size: tensor parallel size of SGLang and vLLM.
        dtype: of vLLM and transformers; "" for their own choice. SGLang's is in `flags`.
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
    """One arm per name, and per backend and cache setting if the engine has them; running servers come last."""
    arms: list[Arm] = []
    for name in names:
        if name in SGLANG_ARMS:
            for backend in serving.backends:
                arms += [_sglang(name, models, serving, backend, radix) for radix in serving.radix]
        elif name in VLLM_ARMS:
            arms += [_vllm(name, models, serving, radix) for radix in serving.radix]
        else:
            arms.append(_transformers(models, serving))
    return arms + [Arm(name, "other", launch=(), url=url.rstrip("/")) for name, url in urls.items()]


def reference_arm(arms: Sequence[Arm]) -> Arm:
    """The arm that others are compared with: off, else the first SGLang arm without simulation, else the first arm."""
    for wanted in (lambda arm: arm.name == "off", lambda arm: arm.engine == "sglang" and not arm.simulated):
        for arm in arms:
            if wanted(arm):
                return arm
    return arms[0]


def _sglang(name: str, models: Models, serving: Serving, backend: str, radix: bool) -> Arm:
    arguments = ["--model-path", models.target, "--tp-size", str(serving.tp_size), *serving.flags]
    arguments += ["--attention-backend", backend] if backend else []
    arguments += [] if radix else ["--disable-radix-cache"]
    # Set for every arm, so that the shell's setting cannot turn one arm into another. Only the rows of `dflash` are the
    # shell's to choose.
    environment = {"SGLANG_DFLASH_WORKER": "builtin" if name == "builtin" else "plugin"}
    environment |= WHOLE_BLOCKS if name == "dflash-full" else {}
    return Arm(
        name,
        "sglang",
        backend,
        radix,
        arguments=(*arguments, *_speculation(name, models), *serving.arm_flags.get(name, ())),
        environment={**environment, **_environment(name, serving)},
    )


def _speculation(name: str, models: Models) -> list[str]:
    if name == "off":
        return []
    algorithm = "DFLASH" if name in DFLASH_ARMS else name.upper()
    draft = models.drafts.get("dflash" if name in DFLASH_ARMS else name)
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
        # vLLM takes the number of drafts, SGLang the block size, which includes the anchor row.
        arguments += ["--speculative-config", json.dumps({**draft, "num_speculative_tokens": models.block_size - 1})]
    # vLLM has /reset_prefix_cache only in this mode.
    environment = {"VLLM_SERVER_DEV_MODE": "1", **_environment(name, serving)}
    launch = (serving.vllm_python, "-m", "vllm.entrypoints.openai.api_server")
    words = (*arguments, *serving.arm_flags.get(name, ()))
    return Arm(name, "vllm", "", radix, launch, words, environment, health="/health")


def _transformers(models: Models, serving: Serving) -> Arm:
    arguments = ["--target", models.target, "--draft", models.drafts["dflash"], "--device", serving.device]
    arguments += ["--dtype", serving.dtype] if serving.dtype else []
    arguments += ["--block-size", str(models.draft_tokens)] if models.draft_tokens else []
    launch = (sys.executable, "-m", "sglang_dflash.reference.batch_worker")
    environment = _environment("transformers", serving)
    return Arm("transformers", "transformers", launch=launch, arguments=tuple(arguments), environment=environment)


def _environment(name: str, serving: Serving) -> dict[str, str]:
    return {**serving.environment, **serving.arm_environment.get(name, {})}


def split_flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))
