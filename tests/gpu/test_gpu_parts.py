"""Tests what the GPU stages share: traces, dummy models, and what the built-in worker needs."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
from stand_in import made_trace

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.gpu import peers
from sglang_dflash.gpu.dummy_pairs import BLOCK_SIZE, DRAFTS, TARGETS, draft_config, make_pair
from sglang_dflash.gpu.trace import count_steps


def test_a_step_is_counted_from_one_target_forward_to_the_next():
    """Fails where driver launches are missed, nested calls count twice, a graph's kernels count as launches, a copy's
    direction is lost, or a wait or read is missed or invented."""
    counts = count_steps(made_trace("step[VERIFY bs=4]", steps=4))
    assert (counts.span, counts.steps, counts.host_ms) == ("step[VERIFY bs=4]", 3, 1.0)
    assert (counts.launches, counts.graphs, counts.kernels) == (2, 1, 5)
    assert (counts.copies_h2d, counts.copies_d2h, counts.copies_d2d, counts.copies_other) == (1, 1, 0, 0)
    assert (counts.pageable, counts.waits, counts.reads, counts.fills) == (1, 1, 1, 0)
    assert counts.launched == {"copy_kernel<float>": 1.0, "_accept_kernel": 1.0}


def test_steps_of_another_kind_end_the_run():
    """Fails where a prefill or a step of another batch size counts as a decode step."""
    events = made_trace("step[DECODE bs=4]", steps=5)["traceEvents"]
    spans = [event for event in events if event["name"] == "step[DECODE bs=4]"]
    spans[2]["name"] = "step[EXTEND bs=1 toks=9]"  # the second of five, both its annotations
    spans[3]["name"] = "step[EXTEND bs=1 toks=9]"
    assert count_steps({"traceEvents": events}).steps == 2
    spans[8]["name"] = spans[9]["name"] = "step[DECODE bs=3]"
    assert count_steps({"traceEvents": events}).steps == 1
    with pytest.raises(ValueError, match="1 decode steps"):
        count_steps(made_trace("step[DECODE bs=4]", steps=1))


@pytest.mark.parametrize("model", TARGETS)
def test_dummy_pairs_are_ones_that_we_serve(model, tmp_path):
    """Fails where a draft is refused, does not fit its target, or transformers cannot read a config."""
    from transformers import AutoConfig, AutoTokenizer

    draft = DraftConfig.from_dict(draft_config(model))
    target = TARGETS[model]
    draft.check_target(target["num_hidden_layers"], target["hidden_size"], target["vocab_size"])
    assert (draft.block_size, draft.num_layers, len(draft.target_layer_ids)) == (BLOCK_SIZE, *DRAFTS[model][:2])
    for folder in make_pair(model, tmp_path):
        config = AutoConfig.from_pretrained(folder)
        assert (config.vocab_size, config.head_dim) == (target["vocab_size"], target["head_dim"])
        assert AutoTokenizer.from_pretrained(folder)("1 + 1")["input_ids"]


def test_headers_are_looked_for_where_sglang_does(tmp_path, monkeypatch):
    """Fails where SGLang asks for other folders of FlashInfer than we look for."""
    from sglang.kernels.jit.utils import deps

    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert "which is not installed" in peers.why_no_builtin()
    package = tmp_path / "flashinfer" / "__init__.py"
    monkeypatch.setattr(peers, "find_spec", lambda name: ModuleSpec(name, None, origin=str(package)))
    monkeypatch.setattr(deps, "_find_package_root", lambda name: package.parent)
    for name in peers.HEADERS:
        assert name in peers.why_no_builtin()
        with pytest.raises(RuntimeError):
            deps.get_flashinfer_include_paths()
        (package.parent / "data" / name).mkdir(parents=True, exist_ok=True)
    assert peers.why_no_builtin() == ""
    assert len(deps.get_flashinfer_include_paths()) == len(peers.HEADERS)
