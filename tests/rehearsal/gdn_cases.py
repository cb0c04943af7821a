"""Gated delta nets over some rows of each block, beside SGLang's own verification of whole blocks; run by
`test_gdn_rows.py`. Backend, convolution and recurrence are SGLang's; Triton interprets its kernels."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from host.stand_ins import configured
from sglang_dflash import ops
from sglang_dflash.host.patches import packed_gdn
from sglang_dflash.host.patches.ragged import RaggedVerifyInput

BLOCK, TAPS, SLOTS, PLACES = 4, 4, 6, 9
KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 8
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
HOOKED = partial(packed_gdn.verify_packed, GDNAttnBackend.forward_extend)


class Layer:
    """One layer of a made-up model, and inputs of whole blocks for each request."""

    def __init__(self, requests: int) -> None:
        generator = torch.Generator().manual_seed(requests)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.module = SimpleNamespace(
            layer_id=0,
            num_q_heads=KEY_HEADS,
            num_k_heads=KEY_HEADS,
            num_v_heads=VALUE_HEADS,
            head_q_dim=DIM,
            head_k_dim=DIM,
            head_v_dim=DIM,
            q_dim=KEY_HEADS * DIM,
            k_dim=KEY_HEADS * DIM,
            v_dim=VALUE_HEADS * DIM,
            conv_weights=randn(CHANNELS, TAPS),
            bias=None,
            activation="silu",
            A_log=randn(VALUE_HEADS),
            dt_bias=randn(VALUE_HEADS),
        )
        self.inputs = randn(requests * BLOCK, CHANNELS)
        self.gates = [randn(requests * BLOCK, VALUE_HEADS) for _ in "ab"]
        self.convolutions = randn(PLACES, CHANNELS, TAPS - 1)
        self.matrices = randn(PLACES, VALUE_HEADS, DIM, DIM)
        self.slots = torch.randperm(PLACES, generator=generator)[:requests].int()

    def run(
        self,
        lens: list[int] | None = None,
        size: int = 0,
        slots: int = 0,
        forward: Any = HOOKED,
        metadata: Any = None,
    ) -> tuple[torch.Tensor, MambaPool.SpeculativeState]:
        """One verification: [T, heads, D] outputs of its rows, and the states.

        Args:
            lens: rows of each request; None: whole blocks, by SGLang alone.
            size, slots: rows and requests of the graph; 0: as many as there are.
            metadata: of the graph, as the host has made it; None: made here.
        """
        requests = len(self.slots)
        count = requests * BLOCK if lens is None else sum(lens)
        rows = torch.arange(count) if lens is None else ops.keep_rows(torch.tensor(lens), BLOCK, count).kept
        spec_info = RaggedVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK)
        starts = torch.arange(0, count + 1, BLOCK, dtype=torch.int32)
        if lens is not None:
            layout = RaggedVerifyLayout.from_verify_lens_device(
                verify_lens=torch.tensor(lens, dtype=torch.int32), graph_num_tokens=size or count
            )
            spec_info.ragged_verify_layout = layout
            padded = layout.padded_to_bucket(padded_bs=slots or requests, cap=BLOCK)
            starts = padded.qo_indptr_device
        places = torch.cat((self.slots, torch.full((max(slots - requests, 0),), -1, dtype=torch.int32)))
        state = self._states()
        made = {"query_start_loc": starts, "mamba_cache_indices": places}
        links = dict.fromkeys(("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"))
        backend = SimpleNamespace(
            forward_metadata=metadata or SimpleNamespace(**made, **links),
            req_to_token_pool=SimpleNamespace(
                mamba2_layer_cache=lambda layer: state, mamba_pool=SimpleNamespace(), size=SLOTS
            ),
            verify_intermediate_state_indices=torch.arange(SLOTS + 1, dtype=torch.int32),
            kernel_dispatcher=TritonGDNKernel(),
            mis_metadata=None,
            requires_contiguous_prefill_state=True,
            _use_strided_target_verify_qkv=True,
        )
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, spec_info=spec_info, req_pool_indices=torch.arange(len(places))
        )
        inputs, a, b = (self._filled(values[rows], size) for values in (self.inputs, *self.gates))
        named = {"layer": self.module, "forward_batch": batch, "mixed_qkv": inputs, "a": a, "b": b, "q": None}
        return forward(backend, **named)[0, :count], state

    def _filled(self, values: torch.Tensor, size: int) -> torch.Tensor:
        """The rows, and NaN up to the graph's size."""
        more = max(size - len(values), 0)
        return torch.cat((values, torch.full((more, values.shape[1]), torch.nan)))

    def _states(self) -> MambaPool.SpeculativeState:
        """The pool, and scratch memory that holds NaN; windows of inputs overlap, as SGLang lays them out."""
        inputs = torch.full((SLOTS + 1, CHANNELS, BLOCK + TAPS - 2), torch.nan)
        of_slot, of_channel, of_input = inputs.stride()
        windows = inputs.as_strided((SLOTS + 1, BLOCK, CHANNELS, TAPS - 1), (of_slot, of_input, of_channel, of_input))
        return MambaPool.SpeculativeState(
            conv=[self.convolutions.clone()],
            temporal=self.matrices.clone(),
            intermediate_ssm=torch.full((SLOTS + 1, BLOCK, VALUE_HEADS, DIM, DIM), torch.nan),
            intermediate_conv_window=[windows],
        )


class Graphs:
    """The host's static metadata of graphs of up to SLOTS requests: captured by size, and filled before each replay."""

    def __init__(self) -> None:
        self.slots = torch.zeros(SLOTS, dtype=torch.int32)  # of each request
        self.backend = GDNAttnBackend.__new__(GDNAttnBackend)
        pool = SimpleNamespace(
            mamba_pool=None,
            get_mamba_indices=lambda requests: self.slots[requests.long()].clone(),
            translate_mamba_indices=lambda slots: slots,
        )
        lists = ("state_indices", "query_start_loc", "retrieve_next_token", "retrieve_next_sibling")
        vars(self.backend).update({f"{name}_list": [] for name in (*lists, "retrieve_parent_token")})
        vars(self.backend).update(device="cpu", pad_slot_id=-1, topk=1, req_to_token_pool=pool)
        vars(self.backend).update(_fused_state_indices_ok=False, _graph_seq_len_fill_value=1)
        self.backend.init_cuda_graph_state(SLOTS, SLOTS * BLOCK)
        self.captured = {size: self._capture(size) for size in (16, 12, 8)}

    def _capture(self, size: int) -> Any:
        lens = build_capture_verify_lens(num_tokens=size, num_slots=SLOTS, num_draft_tokens=BLOCK)
        self._fill(torch.tensor(lens, dtype=torch.int32), size, in_capture=True)
        return self.backend.forward_metadata

    def replay(self, layer: Layer, lens: list[int], size: int) -> Any:
        """The metadata of the graph of so many rows, for these requests."""
        self.slots[: len(lens)] = layer.slots
        self._fill(torch.tensor(lens, dtype=torch.int32), size)
        return self.captured[size]

    def _fill(self, lens: torch.Tensor, size: int, **rest: Any) -> None:
        spec_info = RaggedVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK)
        spec_info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=lens, graph_num_tokens=size
        )
        batch = SimpleNamespace(
            batch_size=SLOTS,
            req_pool_indices=torch.arange(SLOTS),
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=spec_info,
            seq_lens_cpu=None,
            num_padding=SLOTS - len(lens),
        )
        MambaAttnBackendBase.init_forward_metadata_out_graph(self.backend, batch, **rest)


def difference(layer: Layer, lens: list[int], size: int = 0, slots: int = 0, metadata: Any = None) -> str:
    """What differs from whole blocks; "" if nothing does, bit by bit."""
    (whole, right), (some, state) = layer.run(), layer.run(lens, size, slots, metadata=metadata)
    kept = ops.keep_rows(torch.tensor(lens), BLOCK, sum(lens)).kept
    if not torch.equal(some, whole[kept]):
        return "outputs"
    if not torch.equal(state.temporal, right.temporal):
        return "the pool"
    for request, count in enumerate(lens):
        for ours, theirs in (
            (state.intermediate_ssm, right.intermediate_ssm),
            (state.intermediate_conv_window[0], right.intermediate_conv_window[0]),
        ):
            if not torch.equal(ours[request, :count], theirs[request, :count]):
                return "states"
    return ""


CASES = [
    ([3, 1, 4, 2], 0, 0),
    ([3, 1, 4, 2], 12, 4 + 2),
    ([1, 1, 1], 8, 6),
    ([2, 4, 2], 8, 5),
    ([4, 4], 8, 2),
    ([1], 4, 4),
    ([1, 1, 1, 1, 1], 0, 0),
]


@pytest.fixture(autouse=True)
def _configured() -> Any:
    with configured(), torch.no_grad():
        yield


@pytest.mark.parametrize(("lens", "size", "slots"), CASES)
def test_some_rows_of_blocks(lens: list[int], size: int, slots: int) -> None:
    """Fails where a row's output, or a state that a commit may read, is not that of whole blocks: with rows that fill a
    graph, and with requests that do."""
    assert difference(Layer(len(lens)), lens, size, slots) == ""


def test_graphs_replay_other_rows() -> None:
    """Fails where a graph reads the rows or the requests of its capture, or of the replay before."""
    graphs = Graphs()
    for lens, size in (
        ([3, 1, 4], 8),
        ([1, 2, 1, 4], 8),
        ([1, 1], 12),
        ([4, 4, 2, 1, 1], 12),
        ([2, 1, 3, 3, 4, 3], 16),
    ):
        layer = Layer(len(lens))
        metadata = graphs.replay(layer, lens, size)
        assert difference(layer, lens, size, SLOTS, metadata) == "", (lens, size)


def test_whole_blocks_are_the_hosts() -> None:
    """Fails where a verification without a layout does not go to SGLang."""
    layer = Layer(3)
    assert torch.equal(layer.run()[0], layer.run(forward=GDNAttnBackend.forward_extend)[0])


@pytest.mark.parametrize("bug", ["rows of the next block", "starts of whole blocks"])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Fails where this file could not fail."""
    if bug == "rows of the next block":
        scatter = packed_gdn.ragged_verify_dense_scatter_indices
        monkeypatch.setattr(
            packed_gdn, "ragged_verify_dense_scatter_indices", lambda **given: (scatter(**given) + 1) % (4 * BLOCK)
        )
    else:
        verify = TritonGDNKernel.target_verify

        def of_blocks(kernel: Any, *, query_start_loc: torch.Tensor, **given: Any) -> torch.Tensor:
            starts = torch.arange(len(query_start_loc), dtype=torch.int32) * 2
            return verify(kernel, query_start_loc=starts, **given)

        monkeypatch.setattr(TritonGDNKernel, "target_verify", of_blocks)
    assert difference(Layer(4), [3, 1, 2, 2]) != ""
