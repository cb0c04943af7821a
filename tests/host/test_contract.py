"""Compares all that we use of SGLang with its state at the pinned release; a port starts with this test's report.

SGLang's source is read, not imported, so a name that moved is reported like any other change. After a port, or when
we use a new name, `SGLANG_DFLASH_UPDATE_CONTRACT=1 pytest tests/host/test_contract.py` rewrites `contract.json`. Its
diff is the list of changes to review.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_source import SGLANG

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("contract.json")
UPDATE = "SGLANG_DFLASH_UPDATE_CONTRACT"

# Relied on without an import: what calls us, what we call on the host's objects, and what must stay true.
RELIED_ON = [
    # Plugins are loaded in every process, and a hook reaches modules that imported its target before.
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    "sglang.srt.platforms._resolve_platform",
    "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
    "sglang.srt.arg_groups.speculative_hook._handle_dflash",
    # The scheduler: when it calls a worker, what it restores after the call, how it uses the result.
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu",
    "sglang.srt.managers.overlap_utils.FutureMap.publish",
    "sglang.srt.managers.overlap_utils.FutureMap.stash",
    "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
    "sglang.srt.managers.schedule_batch.ReqKvInfo",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.maybe_evict_swa",
    "sglang.srt.managers.scheduler_components.batch_result_processor._get_speculative_output_stride",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    # Metrics: the labels of all series, what an accept rate is made of, and when the scheduler is idle.
    "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.init_new",
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
    "sglang.srt.managers.scheduler.Scheduler.on_idle",
    "sglang.srt.speculative.spec_utils.spec_prepare_for_decode",
    # Packed rows: graphs by their number, requests of padding, and the lengths that a replay reads.
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._build_ragged_verify_token_buckets",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._ragged_capture_slots",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._stage_ragged_verify_layout",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._can_run_ragged_verify_graph",
    "sglang.srt.speculative.ragged_verify.build_ragged_target_verify_geometry",
    # KV: slots reserved for a decode, ids planned for a forward, and slot 0, which must stay finite.
    "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan",
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind",
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.write_ids",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    # How the host walks the drafts for grammars, and cuts logprobs from a step.
    "sglang.srt.speculative.spec_utils.generate_token_bitmask",
    "sglang.srt.speculative.spec_utils.traverse_tree",
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._apply_decode_logprobs",
    # Gemma 3's loop, whose taps lack the residual; its wrapper, which changes positions and has no head of its own.
    "sglang.srt.models.gemma3_mm.Gemma3ForConditionalGeneration.forward",
    "sglang.srt.models.gemma3_mm.Gemma3ForConditionalGeneration.set_eagle3_layers_to_capture",
    "sglang.srt.models.gemma3_causal.Gemma3TextModel.forward",
    "sglang.srt.models.gemma3_causal.Gemma3DecoderLayer.forward",
    # What a model made dense says to an update; the draft's own way to context KV.
    "sglang.srt.model_executor.model_runner_components.weight_updater._unsupported_derived_weight_cache_error",
    "sglang.srt.models.dflash.DFlashAttention.kv_proj_only",
    "sglang.srt.models.dflash.DFlashAttention.apply_k_norm",
    "sglang.srt.models.dflash.DFlashAttention.apply_k_rope",
    # Page tables, whose width we change; graph inputs, filled early on a plan stream; logits, left sharded.
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.__init__",
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend.__init__",
    "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend.__init__",
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits",
    "sglang.srt.model_executor.input_buffers.share_input_buffer",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch",
    # The draft model, whose weights and projection we use, and the switch that we turn off on a CPU.
    "sglang.srt.models.dflash.DFlashAttention.__init__",
    "sglang.srt.models.dflash.DFlashAttention.forward",
    "sglang.srt.models.dflash.DFlashDraftModel.forward",
    "sglang.srt.models.dflash.DFlashDraftModel.project_target_hidden",
    "sglang.srt.models.dflash.DFlashDraftModel.set_block_size",
    # DFlash2 and Domino: convolution, selector and rollout, which our ops and the reference compute themselves.
    "sglang.srt.models.dflash._grouped_conv",
    "sglang.srt.models.dflash._score_edges",
    "sglang.srt.models.dflash.DFlashDecoderLayer.forward",
    "sglang.srt.models.dflash.DFlash2DraftModel.__init__",
    "sglang.srt.models.dflash.DFlash2DraftModel._transform_unary_logits",
    "sglang.srt.speculative.dflash_utils.parse_dflash_draft_config",
    "sglang.srt.speculative.dflash_worker_v2._SelectorDraftSampler.__call__",
    # A CPU's captured forward: the traced forwards, the attention at which they are cut, the copy that is skipped.
    "sglang.srt.models.qwen3.Qwen3Model.forward",
    "sglang.srt.models.llama.LlamaModel.forward",
    "sglang.srt.models.qwen2.Qwen2Model.forward",
    "sglang.srt.models.glm4.Glm4Model.forward",
    "sglang.srt.models.gemma4_causal.Gemma4TextModel.forward",
    "sglang.srt.models.qwen3_5.Qwen3_5ForCausalLM.forward",
    "sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet.forward",
    "sglang.srt.models.qwen3_vl.Qwen3LLMModel.forward",
    # Nemotron-H: how a layer of Mamba-2 calls our backend, what the layer holds, what is tapped.
    "sglang.srt.models.nemotron_h.NemotronHMambaDecoderLayer._forward_mamba",
    "sglang.srt.models.nemotron_h.NemotronHForCausalLM.set_dflash_layers_to_capture",
    "sglang.srt.layers.attention.mamba.mamba.MambaMixer2",
    # A ring of updates: what is allocated, when it is emptied, who writes it, and what reads stored states.
    "sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.alloc",
    "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.prepare_for_caching_req",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
    "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend._replayssm_target_verify",
    # Wrappers: how embeddings and positions reach the layers.
    "sglang.srt.models.qwen3_vl.Qwen3VLForConditionalGeneration.forward",
    "sglang.srt.models.qwen3_vl.Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture",
    "sglang.srt.managers.mm_utils.general_mm_embed_routine",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
    "sglang.srt.layers.radix_attention.RadixAttention.forward",
    "sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch",
    # Parameters and grammars that a request may bring besides those of `SamplingParams`.
    "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
    "sglang.srt.managers.schedule_batch.Req.__init__",
    # SGLang's client, which `serving.timing` runs: its flags, rows whose fields replace a request's, what it reports.
    "sglang.benchmark.serving.async_request_openai_completions",
    "sglang.benchmark.serving.async_request_sglang_generate",
    "sglang.benchmark.serving.benchmark",
    "sglang.benchmark.serving.cli_main",
    "sglang.benchmark.datasets.openai_dataset.sample_openai_requests",
]


def used_names() -> list[str]:
    """Every sglang name that our host folder, our CPU platform and tests import, hook (as a string), or rely on."""
    folders = "python/sglang_dflash/host", "python/sglang_cpu", "tests"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in files for name in _names_in(path.read_text()) if path != Path(__file__)}
    return sorted(names | set(RELIED_ON))


def _names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "sglang")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "sglang":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"sglang\.(srt|kernels)(\.\w+)+", str(node.value)):
            yield node.value


def _file_of(module: str) -> Path | None:
    base = SGLANG.parent.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


@cache
def _parsed(path: Path) -> tuple[list[str], ast.Module]:
    source = path.read_text()
    return source.splitlines(keepends=True), ast.parse(source)


class GoneError(LookupError):
    """The installed SGLang has no such name."""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, also those under `if` and `try`, where a name may be bound per device."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try):
                yield from _statements(getattr(statement, part, []))


def _bindings(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    found = []
    for statement in _statements(body):
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if getattr(statement, "name", None) == name or any(getattr(t, "id", None) == name for t in targets):
            found.append(statement)
    return found


def find(name: str) -> tuple[Path, list[ast.stmt]]:
    """Where a dotted name is defined: its file, and the statements that bind it (none for a module).

    Raises:
        GoneError: it is not defined.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = _file_of(".".join(parts[:length]))
        if path is not None:
            return _find_in(".".join(parts[:length]), path, parts[length:])
    raise GoneError(name)


def _find_in(module: str, path: Path, attributes: list[str]) -> tuple[Path, list[ast.stmt]]:
    if not attributes:
        return path, []
    tree = _parsed(path)[1]
    first, *rest = attributes
    found = _bindings(tree.body, first)
    for statement in _statements(tree.body):
        if not found and isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == first:
                    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                    parents = package.split(".")[: len(package.split(".")) - statement.level + 1]
                    base = (
                        ".".join([*parents, *filter(None, [statement.module])]) if statement.level else statement.module
                    )
                    return find(".".join([base, alias.name, *rest]))
    for attribute in rest:
        found = _member(module, path, found, attribute)
    found = found or _bindings(tree.body, "__getattr__")  # a lazy name, such as `platforms.current_platform`
    if not found:
        raise GoneError(".".join([module, *attributes]))
    return path, found


def _member(module: str, path: Path, classes: list[ast.stmt], name: str) -> list[ast.stmt]:
    own = [node for cls in classes if isinstance(cls, ast.ClassDef) for node in _bindings(cls.body, name)]
    if not own:
        raise GoneError(f"{module}.{classes[0].name if classes else '?'}.{name}")
    return own


def describe(name: str) -> dict[str, Any]:
    """A name's file, signature and the hash of its source; for a class, also its members."""
    path, statements = find(name)
    lines = _parsed(path)[0]
    entry: dict[str, Any] = {"file": path.relative_to(SGLANG.parent).as_posix()}
    if not statements:
        return entry | {"signature": "module", "hash": _hash("".join(lines))}
    entry["signature"] = "; ".join(_signature(statement) for statement in statements)
    entry["hash"] = _hash("\n".join(_source(lines, statement) for statement in statements))
    members: dict[str, str] = {}
    for cls in statements:
        if isinstance(cls, ast.ClassDef):
            for node in _statements(cls.body):
                target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
                member = getattr(node, "name", None) or getattr(target, "id", None)
                if member:
                    members[member] = _hash(members.get(member, "") + _source(lines, node))[:6]
    return entry | ({"members": members} if members else {})


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    if isinstance(node, ast.ClassDef):
        return f"class ({', '.join(ast.unparse(base) for base in node.bases)})"
    return "value"


def _source(lines: list[str], node: ast.stmt) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def changes(name: str, stored: dict[str, Any] | None, current: dict[str, Any] | None) -> list[str]:
    """One line per difference between two descriptions of a name; None stands for a missing description."""
    if current is None:
        return [f"{name}: gone from {stored['file'] if stored else 'SGLang'}"]
    if stored is None:
        return [f"{name} ({current['file']}): not in contract.json yet"]
    where, found = f"{name} ({current['file']})", []
    if stored["file"] != current["file"]:
        found.append(f"{where}: moved from {stored['file']}")
    if stored["signature"] != current["signature"]:
        found.append(f"{where}: signature was {stored['signature']}, is {current['signature']}")
    before, after = stored.get("members", {}), current.get("members", {})
    for word, members in (
        ("added", after.keys() - before.keys()),
        ("removed", before.keys() - after.keys()),
        ("changed", {member for member in before.keys() & after.keys() if before[member] != after[member]}),
    ):
        if members:
            found.append(f"{where}: {word} {', '.join(sorted(members))}")
    if stored["hash"] != current["hash"] and not found:
        found.append(f"{where}: its body changed")
    return found


def current_contract() -> dict[str, dict[str, Any] | None]:
    """Every used name -> its description; None if it is gone."""
    found: dict[str, dict[str, Any] | None] = {}
    for name in used_names():
        try:
            found[name] = describe(name)
        except GoneError:
            found[name] = None
    return found


def _write(symbols: dict[str, dict[str, Any] | None]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(symbols.items()))
    STORED.write_text(f'{{\n "sglang": {json.dumps(metadata.version("sglang"))},\n "symbols": {{\n{lines}\n }}\n}}\n')


def test_sglang_is_as_we_know_it():
    """Fails where a name that we use changed in any way since the contract was written, or is not in it."""
    current = current_contract()
    if os.environ.get(UPDATE) == "1":
        _write(current)
    stored = json.loads(STORED.read_text())["symbols"]
    report = [line for name, entry in current.items() for line in changes(name, stored.get(name), entry)]
    report += [f"{name}: in contract.json, but not used any more" for name in sorted(stored.keys() - current.keys())]
    assert not report, "\n".join(["", *report, f"Reviewed? {UPDATE}=1 accepts what is there."])


def test_contract_is_of_the_pin():
    """Fails where contract, pin and installation are of different releases."""
    from sglang_dflash.host.start.version import SUPPORTED_SGLANG

    assert json.loads(STORED.read_text())["sglang"] == SUPPORTED_SGLANG == metadata.version("sglang")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"file": "b.py"}, ["moved from a.py"]),
        ({"signature": "(x, y)", "hash": "1"}, ["signature was (x), is (x, y)"]),
        ({"hash": "1"}, ["its body changed"]),
        ({"hash": "1", "members": {"f": "9", "h": "2"}}, ["added h", "removed g", "changed f"]),
    ],
)
def test_changes_are_named(changed, expected):
    """Fails where the report does not say what changed."""
    stored = {"file": "a.py", "signature": "(x)", "hash": "0", "members": {"f": "1", "g": "1"}}
    found = changes("sglang.f", stored, {**stored, **changed})
    assert [line.split(": ", 1)[1] for line in found] == expected
    assert changes("sglang.f", stored, None) == ["sglang.f: gone from a.py"]
    assert "not in contract.json" in changes("sglang.f", None, stored)[0]


def test_a_missing_name_is_gone():
    """Fails where a name that does not exist is described as another one."""
    for name in (
        "sglang.srt.nowhere.f",
        "sglang.srt.managers.utils.nothing",
        "sglang.srt.managers.utils.GenerationBatchResult.no",
    ):
        with pytest.raises(GoneError):
            find(name)


PROBE = """
import json, pkgutil, types
import sglang.srt.managers.scheduler as scheduler  # before the plugins, as the host does
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_dflash.host.start import hooks
targets = sorted(hooks.registered_hooks())
found = {"targets": targets, "callable": [t for t in targets if callable(pkgutil.resolve_name(t))]}
found["missing_before"] = hooks.missing_hooks()
load_plugins()
found["missing_after"] = hooks.missing_hooks()
found["worker"] = SpeculativeAlgorithm.DFLASH.create_worker(None).__module__
found["check"] = scheduler.validate_dflash_request.__wrapped__.__module__
params = types.SimpleNamespace(beam_width=3, watermark=None, stop_token_ids=None)
request = types.SimpleNamespace(sampling_params=params, origin_input_ids_unpadded=[0], vocab_size=9)
found["refusal"] = scheduler.validate_dflash_request(request, True)
try:
    SpeculativeAlgorithm.NONE.create_worker(types.SimpleNamespace())
except AssertionError as error:
    found["none"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What a fresh process sees before and after SGLang loads its plugins."""
    ours = ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_DFLASH_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    process = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_every_hook_is_applied(probe):
    """Fails where a hook's target does not resolve, SGLang fails to patch it, or `missing_hooks` cannot tell."""
    assert probe["targets"]
    assert probe["callable"] == probe["targets"]
    assert probe["missing_before"] == probe["targets"]
    assert probe["missing_after"] == []


def test_every_hook_target_is_in_the_contract(probe):
    """Fails where a target is built at run time, so that the contract misses it."""
    assert set(probe["targets"]) <= set(used_names())


def test_dflash_gets_our_worker(probe):
    """Fails where the hook does not choose our worker for DFLASH, or also acts on other algorithms."""
    assert probe["worker"] == "sglang_dflash.host.worker.build"
    assert "Cannot create worker for NONE" in probe["none"]


def test_hooks_reach_the_scheduler(probe):
    """Fails where the scheduler, imported before the hooks are applied, keeps SGLang's own request check."""
    assert probe["check"] == "sglang.srt.speculative.dflash_utils"
    assert "beam_width=3" in probe["refusal"]


def test_builtin_worker_is_left_alone(monkeypatch):
    """Fails where `SGLANG_DFLASH_WORKER=builtin` still gets our worker or our request check."""
    from sglang_cpu.hooking import hooks_of
    from sglang_dflash.host.patches import (
        block_results,
        capture,
        disaggregation,
        packed_gdn,
        ragged,
        sampler,
        sessions,
        stored_kv,
        streamed_text,
        weights,
    )
    from sglang_dflash.host.start import features, hooks, requests
    from sglang_dflash.host.worker import metrics, row_report, sampling_masks, state_ring, trees, trimmed_rows

    modules = [block_results, capture, sampler, sessions, weights, features, requests, ragged, row_report, metrics]
    modules += [sampling_masks, disaggregation, packed_gdn, stored_kv, streamed_text, state_ring, trees, trimmed_rows]
    seams = [hooks_of(module) for module in modules]
    declared = {target for seam in seams for target, hook in seam.items() if not hook.always}
    ours = {hooks.CREATE_WORKER, hooks.VALIDATE_REQUEST, *declared}
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "plugin")
    with_ours = set(hooks.registered_hooks())
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "builtin")
    assert ours <= with_ours
    assert set(hooks.registered_hooks()) == with_ours - ours


def test_an_unknown_worker_is_refused(monkeypatch):
    """Fails where a misspelt switch silently selects one of the workers."""
    from sglang_dflash.host.start.version import builtin_worker_requested

    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "built-in")
    with pytest.raises(SystemExit, match=r"'built-in' is not known: use 'plugin' .* or 'builtin'"):
        builtin_worker_requested()
