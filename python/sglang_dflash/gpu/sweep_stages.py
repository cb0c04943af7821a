"""The stages that run a sweep of the benchmark: smoke test, and step times with simulated acceptance."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.options import Options, check_resumable
from sglang_dflash.bench.planning import digests, make_plan
from sglang_dflash.bench.records import Run
from sglang_dflash.bench.sweep import Sweep
from sglang_dflash.gpu.budget import BudgetBoard, OutOfTimeError
from sglang_dflash.gpu.dummy_pairs import make_pair
from sglang_dflash.gpu.estimates import ROW_LOADS, ROW_REPEATS, SMOKE_LOADS, STEP_LOADS, STEP_REPEATS
from sglang_dflash.gpu.grown_pair import Shape, grown_pair
from sglang_dflash.gpu.results import OtherRunError, Row, Stage
from sglang_dflash.gpu.setting import EMBEDDED_FLAGS, NO_PREFILL_GRAPHS, Setting
from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.serving.rendering import Renderer

ARMS = "off,dflash,builtin"
ROW_ARMS = "off,dflash,dflash-full"  # a sweep of step times has the built-in, whose start takes two minutes longer
REHEARSED_LOADS = (1, 4)
REHEARSED_SHAPE = Shape(hidden=1024, intermediate=1024, heads=16, kv_heads=4, layers=9, draft_layers=3, vocab=4096)
ORDER = ("off", "dflash", "dflash-full", "builtin")  # of arms in tables
EQUALITY = ("compared", "identical", "ties", "different")
MOST = max(STEP_LOADS)
TAU = 6.0  # simulated; about what published drafts reach on easier tasks
OURS = "sglang-dflash"  # the start of our worker's start-up line
LEAST_TAU = 2.5  # lower bound for the embedded pair: a draft that is never accepted gives equal tokens, too
# Three servers share the GPU's memory: about 22 GB each. A server takes what others took meanwhile for its own weights,
# so nearly all memory must count as its own; the pool then has the given size.
SHARED_MEMORY = ("--mem-fraction-static", "0.97", "--max-total-tokens", "16384")
ROW_MEMORY = ("--mem-fraction-static", "0.97", "--max-total-tokens", "32768")
STEP_NOTES = (
    f"Dummy weights: SGLang draws the commit lengths with mean {TAU:g}; tokens mean nothing. The off arm decodes one "
    "token per step.",
    "step_ms = concurrent requests x tau / tok_s, with prefills; decode_ms = median TPOT x tau, without prefills.",
    "With simulated acceptance, our worker runs argmax and acceptance as two ops instead of one, and both workers fill "
    "three more tensors than in normal serving.",
    "Prefills run without graphs, in every arm.",
)
ROW_NOTES = (
    "The embedded pair in matrices of Qwen3-8B's shape (gpu/grown_pair.py), blocks of 8. dflash verifies the rows that "
    "pay (SGLANG_DFLASH_WIDTH=adaptive), dflash-full whole blocks.",
)


def smoke(setting: Setting, stage: Stage) -> str:
    """Embedded pair in bfloat16: servers start, greedy tokens equal those of speculation off, drafts are accepted.

    Returns:
        Why another call is needed, or "".
    """
    backend = setting.backends[0]
    options = _options(
        setting,
        stage.stage,
        attention_backends=backend,
        concurrencies=_loads(SMOKE_LOADS),
        num_prompts=16,
        max_new_tokens=128,
        server_flags=shlex.join([*EMBEDDED_FLAGS, *setting.flags(backend)]),
    )

    def fill(run: Run) -> None:
        stage.rows, stage.notes = _rows(run, ()), []
        stage.failures += _unequal(run)

    left = _sweep(setting, stage, options, fill, keep_tokens=True)
    stage.failures += _strangers(Path(options.logs))
    for row in stage.rows:
        if row["arm"] == "dflash" and (row["tau"] or 0.0) < LEAST_TAU:
            stage.failures.append(f"tau of dflash at {row['load']:g} is {row['tau']}, below {LEAST_TAU}")
    return left


def _unequal(run: Run) -> list[str]:
    return [
        f"{cell.key.arm} at {cell.key.load:g}: {example}"
        for cell in run.cells
        if cell.equality is not None and cell.equality.withheld
        for example in cell.equality.examples
    ]


def _strangers(logs: Path) -> list[str]:
    """Failures: servers that ran another worker than their arm names. SGLang falls back to its own worker silently."""
    found = []
    for log in sorted(logs.glob("*.log")):
        arm = log.name.split("-")[1]
        ours = f"{OURS} " in (text := log.read_text(errors="replace")) and "serves DFLASH" in text
        if ours != (arm == "dflash"):
            found.append(f"{arm} was served by {'our' if ours else 'another'} worker (log: {log.name})")
    return found


def step_times(setting: Setting, stage: Stage, model: str, backend: str) -> str:
    """Times off, our worker and the built-in at every load: a dummy target of a real shape, a block-16 draft.

    Returns:
        Why another call is needed, or "".
    """
    target, draft = make_pair(model, setting.models)
    simulate = [f"{arm}:SGLANG_SIMULATE_ACC_LEN={TAU}" for arm in ("dflash", "builtin")]
    options = _options(
        setting,
        stage.stage,
        target_model=str(target),
        draft_model=str(draft),
        attention_backends=backend,
        concurrencies=_loads(REHEARSED_LOADS if setting.rehearsal else STEP_LOADS),
        max_new_tokens=256,
        repeats=1 if setting.rehearsal else STEP_REPEATS,
        ignore_eos=True,
        env=simulate,
        server_flags=shlex.join([*dummy_flags(setting), *setting.flags(backend)]),
    )

    def fill(run: Run) -> None:
        stage.rows = _rows(run, ("step_ms", "decode_ms"))
        stage.notes = [*STEP_NOTES, *(note for note in run.notes if "simulated" not in note)]

    return _sweep(setting, stage, options, fill, keep_tokens=False)


def rows_that_pay(setting: Setting, stage: Stage, backend: str) -> str:
    """Times packed rows, whole blocks and off with the embedded pair in Qwen3-8B's shape: its drafts are
    accepted as those of the small pair, and its steps cost what an 8B model's cost.

    Returns:
        Why another call is needed, or "".
    """
    shape, device = (REHEARSED_SHAPE, "cpu") if setting.rehearsal else (Shape(), "cuda")
    loads = REHEARSED_LOADS if setting.rehearsal else ROW_LOADS
    flags = ["--max-running-requests", str(max(loads)), "--cuda-graph-max-bs-decode", str(max(loads))]
    flags += [*NO_PREFILL_GRAPHS, *(() if setting.rehearsal else ROW_MEMORY), *setting.flags(backend)]

    def fill(run: Run) -> None:
        stage.rows = _rows(run, ("dataset", *EQUALITY))
        stage.notes = [*ROW_NOTES, *run.notes]

    with grown_pair(shape, device) as (target, draft):
        options = _options(
            setting,
            stage.stage,
            arms=ROW_ARMS,
            target_model=str(target),
            draft_model=str(draft),
            dataset_name="chat,arithmetic",
            attention_backends=backend,
            concurrencies=_loads(loads),
            num_prompts=2 * max(loads),
            max_new_tokens=128,
            repeats=1 if setting.rehearsal else ROW_REPEATS,
            env=["dflash:SGLANG_DFLASH_WIDTH=adaptive"],
            server_flags=shlex.join(flags),
        )
        return _sweep(setting, stage, options, fill, keep_tokens=True)


def _loads(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def dummy_flags(setting: Setting) -> list[str]:
    """Allows MOST concurrent requests and captures decode graphs up to that size."""
    flags = ["--load-format", "dummy", "--max-running-requests", str(MOST), "--cuda-graph-max-bs-decode", str(MOST)]
    # In bfloat16, SGLang's own draft launches a Triton kernel even on a CPU.
    return [*flags, *NO_PREFILL_GRAPHS, *(["--dtype", "float32"] if setting.rehearsal else SHARED_MEMORY)]


def _sweep(setting: Setting, stage: Stage, options: Options, fill: Callable[[Run], None], keep_tokens: bool) -> str:
    """Resumes the sweep of earlier calls; the stage is filled in and kept after every cell.

    Args:
        fill: writes the rows and notes of the stage, and adds failures.

    Returns:
        Why another call is needed, or "".

    Raises:
        OtherRunError: earlier calls of this stage used other options.
    """
    renderer = Renderer(options.target_model or str(TINY_TARGET), {"enable_thinking": False})
    plan = make_plan(options, renderer.count)
    plan = replace(plan, arms=tuple(setting.served(plan.arms)))
    run = Run(setting.command, "closed", options.to_json(digests(plan)), stage.versions, stage.machine)
    path = setting.raw / f"{stage.stage}.run.json"
    if path.exists():
        held = Run.load(path)
        try:
            check_resumable(run.workload, run.options, held.workload, held.options)
        except ValueError as error:
            raise OtherRunError(f"{path}: {error}") from None
        run.cells, run.servers, run.notes = held.cells, held.servers, held.notes

    def keep() -> None:
        stage.failures = [
            f"{cell.key.arm} at {cell.key.load:g}, {cell.key.backend or 'own backend'}: {cell.failure}"
            for cell in run.cells
            if cell.failure
        ]
        fill(run)
        setting.note_absent(stage)
        setting.keep(stage)

    def board(cells: int, starts: int) -> BudgetBoard:
        return BudgetBoard(setting.screen, cells, starts, setting.budget, run, keep)

    left = ""
    try:
        Sweep(plan, run, renderer, path).go(board)
    except OutOfTimeError as reason:
        left = str(reason)
    if not keep_tokens and not left:  # tokens of dummy weights mean nothing and would fill the file
        for cell in run.cells:
            cell.records = [replace(record, ids=[], text="") for record in cell.records]
        run.save(path)
    keep()
    return left


def _rows(run: Run, more: tuple[str, ...]) -> list[Row]:
    """Arm by arm; a sweep runs them in turn."""
    rows = [_row(row, more) for row in frame(run).to_dict("records")]
    return sorted(rows, key=lambda row: (ORDER.index(row["arm"]), row["load"]))


def _row(row: dict[str, Any], more: tuple[str, ...]) -> Row:
    """The columns of a benchmark row that the stage keeps, with step_ms and decode_ms."""
    tau = row["tau"] if "tau" in row and math.isfinite(row["tau"]) else 1.0
    tok_s, tpot_ms = row.get("tok_s", math.nan), row.get("tpot_ms_p50", math.nan)
    row = row | {"step_ms": 1e3 * row["load"] * tau / tok_s, "decode_ms": tpot_ms * tau}
    kept = ("arm", "backend", "load", "tok_s", "tau", *more, "speedup_off", "speedup_builtin")
    found = {name: row.get(name, math.nan) for name in kept}
    return found if more else found | {name: int(row[name]) for name in EQUALITY}


def _options(setting: Setting, stage: str, **changes: Any) -> Options:
    """The benchmark's options for the embedded pair; `changes` replaces fields."""
    fields: dict[str, Any] = {"arms": ARMS, "dataset_name": "tiny", "request_rate": "1", "think_s": 0.0}
    fields |= {"together": True, "stall_s": 60.0, "start_s": 540.0, "logs": setting.raw / f"{stage}-logs"}
    return Options(**{**fields, "output_md": setting.raw / f"{stage}.md", **changes})
