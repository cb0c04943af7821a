"""Makes a benchmark's plan from its options: models, flags for this machine, and the sessions of every dataset."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from sglang_dflash.bench.datasets import agent_sessions, load
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import WORKLOADS
from sglang_dflash.cli.benchmark_options import RADIX, Options, words
from sglang_dflash.core.device import on_cuda
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.serving.arms import VLLM_ARMS, Models, Serving, arms_of, reference_arm, split_flags
from sglang_dflash.serving.device import device_flags, tiny_dtype, tiny_flags

TINY_DATASETS = "arithmetic,code,chat"
TINY_TOKENS = 32768  # in the KV pool, on a CPU
ANSWER_TOKENS = {"closed": (2048, 128), "open-loop": (2048, 128), "agent": (512, 96)}  # and of the embedded pair


def make_plan(options: Options) -> Plan:
    """
    Raises:
        ValueError: a model or dataset cannot be read.
    """
    tiny = options.target_model is None
    target = options.target_model or str(TINY_TARGET)
    workload = WORKLOADS[options.workload]
    counts = {
        load_: options.num_prompts or max(workload.least, round(workload.per_load * load_)) for load_ in options.loads()
    }
    names = words(options.dataset_name or (TINY_DATASETS if tiny else "gsm8k"))
    most = max(counts.values())
    datasets = {name: load(name, most, options.seed) for name in names}
    if options.workload == "agent":
        datasets = {name: agent_sessions(tasks, most, _context(target)) for name, tasks in datasets.items()}
    arms = arms_of(options.arm_names(), _models(options, target), _serving(options, tiny), options.urls())
    return Plan(
        arms=tuple(sorted(arms, key=lambda arm: arm.name != reference_arm(arms).name)),  # reference first
        target=target,
        workload=options.workload,
        loads=options.loads(),
        datasets=datasets,
        counts=counts,
        repeats=options.repeats,
        interleave=options.interleave,
        together=options.together,
        sampling=options.sampling(options.max_new_tokens or ANSWER_TOKENS[options.workload][tiny]),
        seed=options.seed,
        think_s=options.think_s,
        stall_s=options.stall_s,
        start_s=options.start_s,
        logs=options.logs or Path(tempfile.mkdtemp(prefix="sglang-dflash-bench-")),
    )


def digests(plan: Plan) -> dict[str, str]:
    """Digests of each dataset's first sessions, which every load uses: a resumed run must have the same."""
    held = {name: repr(sessions[: min(plan.counts.values())]) for name, sessions in plan.datasets.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in held.items()}


def _context(target: str) -> int:
    """Tokens of the model's context; 0 if its config does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 0


def _models(options: Options, target: str) -> Models:
    drafts = {"eagle3": options.eagle3_draft, "standalone": options.standalone_draft, "dflash": options.draft_model}
    if options.target_model is None and options.draft_model is None:
        drafts["dflash"] = str(TINY_DRAFT)
    known = {name: draft for name, draft in drafts.items() if draft}
    block_size = options.draft_tokens or (_block_size(known["dflash"]) if options.wants_draft() else 0)
    return Models(target, known, options.draft_tokens, block_size)


def _block_size(draft: str) -> int:
    from transformers.utils import cached_file

    try:
        config = cached_file(draft, "config.json")
    except OSError as error:
        raise ValueError(f"--draft-model {draft} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return DraftConfig.from_dict(json.loads(Path(config).read_text(encoding="utf-8"))).most_rows


def _serving(options: Options, tiny: bool) -> Serving:
    cuda = on_cuda()
    given = split_flags(options.server_flags)
    dtype = options.dtype or (tiny_dtype() if tiny else "")
    flags = tiny_flags(TINY_TOKENS, dtype) if tiny else ["--dtype", dtype] if dtype else []
    flags += device_flags(given)
    environment = options.environment()
    common = environment.pop("", {})
    if not cuda:
        for name in VLLM_ARMS:
            environment[name] = {**_vllm_on_cpu(options.vllm_python, tiny), **environment.get(name, {})}
    return Serving(
        flags=(*flags, *given),
        arm_flags={name: split_flags(text) for name, text in options.flags_by_arm().items()},
        environment=common,
        arm_environment=environment,
        backends=options.backends(),
        radix=RADIX[options.radix_cache],
        tp_size=options.tp_size,
        vllm_python=options.vllm_python,
        dtype=dtype,
        device="cuda" if cuda else "cpu",
    )


def _vllm_on_cpu(python: str, tiny: bool) -> dict[str, str]:
    """Variables that vLLM's instructions for CPUs ask for: a KV cache that leaves free memory, and Intel's OpenMP.

    Intel's OpenMP is set if vLLM's environment has it. Like every other server, vLLM chooses its own number of threads.
    """
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    return {"VLLM_CPU_KVCACHE_SPACE": "1" if tiny else "8", **preload}
