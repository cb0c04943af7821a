"""The ring of updates that replaces the states of all verified rows (`--enable-linear-replayssm-spec`), in torch.

A verification of the gated delta rule writes each row's update vector, normalised key and decay into its request's
ring. A state is the request's last stored one, followed by the accepted updates of its ring. A commit moves cursors,
and now and then it stores the state and empties the ring. SGLang's kernels for this are Triton's
(`kernels/ops/attention/linear/gdn_replayssm_spec_decode.py`); these bodies take their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_cpu.hooking import REPLACE, hook
from sglang_cpu.ops import StateRows
from sglang_cpu.ops.recurrent_reference import split_heads

ADVANCE = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode.commit_gdn_replayssm_spec"
STORE = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode.commit_gdn_replayssm_circular"
STORE_WINDOWS = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.fused_conv_window_scatter_with_mask"
_WHY, _UNTIL = "it launches Triton", "SGLang asks its platform here"


@dataclass(frozen=True, slots=True)
class Ring:
    """One layer's rings of R requests, each of L places, a power of two.

    Fields:
        updates: [R, H, L, V]; keys: [R, Hk, L, K]; in the activations' dtype.
        low_updates, low_keys: what their dtype has rounded off, of the same shapes; None in float32.
        decays: [R, H, L] float32; logarithms.
        lens, starts: [R] int32; accepted places, and the place of the first of them.
    """

    updates: torch.Tensor
    keys: torch.Tensor
    low_updates: torch.Tensor | None
    low_keys: torch.Tensor | None
    decays: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor

    def after(self, states: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The states after so many updates of the rings, one after the other, in float32.

        Args:
            states: [B, H, V, K], the stored ones.
            rows: [B] int64; the requests' rings. counts: [B] int64, at most L.
        """
        states = states.float()
        size = self.decays.shape[-1]
        for place in range(int(counts.max()) if len(counts) else 0):
            at = (self.starts[rows].long() + place) % size
            exists = place < counts
            decay = torch.where(exists[:, None], self.decays[rows, :, at], 0.0).exp()
            update = torch.where(exists[:, None, None], _whole(self.updates, self.low_updates, rows, at), 0.0)
            key = _whole(self.keys, self.low_keys, rows, at)
            key = key.repeat_interleave(states.shape[1] // key.shape[1], dim=1)
            states = states * decay[..., None, None] + update[..., None] * key[..., None, :]
        return states

    def write(
        self, rows: torch.Tensor, at: torch.Tensor, update: torch.Tensor, key: torch.Tensor, decay: torch.Tensor
    ) -> None:
        """Writes one place of each ring. update: [B, H, V]; key: [B, Hk, K]; decay: [B, H]; all float32."""
        for high, low, value in (
            (self.updates, self.low_updates, update),
            (self.keys, self.low_keys, key),
        ):
            high[rows, :, at] = value.to(high.dtype)
            if low is not None:
                low[rows, :, at] = (value - value.to(high.dtype).float()).to(low.dtype)
        self.decays[rows, :, at] = decay


def _whole(high: torch.Tensor, low: torch.Tensor | None, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    value = high[rows, :, at].float()
    return value if low is None else value + low[rows, :, at].float()


def ring_of(pool: Any, cache: Any) -> Ring:
    """The rings of a layer's `cache`, with the cursors of SGLang's `MambaPool`."""
    return Ring(
        updates=cache.replayssm_d,
        keys=cache.replayssm_k,
        low_updates=cache.replayssm_rawv,
        low_keys=cache.replayssm_rawk,
        decays=cache.replayssm_g,
        lens=pool.replayssm_spec_write_pos,
        starts=pool.replayssm_cache_base,
    )


def verify(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_k_heads: int,
    states: torch.Tensor,
    rows: StateRows,
    ring: Ring,
    ring_rows: torch.Tensor,
) -> torch.Tensor:
    """`recurrent_reference.delta_rule` of a verification: states stay as they are, rings get the rows' updates behind
    the accepted ones.

    Args:
        qkv, g, beta, num_k_heads, states, rows: as there; g is [T, H].
        ring_rows: [B] int64; the requests' rings.

    Returns:
        [T, H, V] in `qkv`'s dtype.
    """
    _, heads, v_dim, k_dim = states.shape
    q, k, v = split_heads(qkv, num_k_heads, heads, k_dim, v_dim)
    out = qkv.new_empty(len(qkv), heads, v_dim)
    lens = ring.lens[ring_rows].long()
    state = ring.after(states[rows.slots], ring_rows, lens)
    counts = rows.row_starts.diff()
    for place in range(int(counts.max()) if len(counts) else 0):
        some = (counts > place).nonzero()[:, 0]  # requests that have such a row
        row, ringed = rows.row_starts[some] + place, ring_rows[some]
        at = (ring.starts[ringed].long() + lens[some] + place) % ring.decays.shape[-1]
        before = state[some] * g[row].exp()[..., None, None]
        seen = (before * k[row][..., None, :]).sum(-1)
        update = beta[row][..., None] * (v[row] - seen)
        after = before + update[..., None] * k[row][..., None, :]
        state[some] = after
        out[row] = (after * q[row][..., None, :]).sum(-1).to(out.dtype)
        ring.write(ringed, at, update, k[row][:, :: heads // num_k_heads], g[row])
    return out


@hook(ADVANCE, REPLACE, why=_WHY, until=_UNTIL)
def advance(
    write_pos: torch.Tensor,
    cache_base: torch.Tensor,
    is_flush: torch.Tensor,
    num_accepted: torch.Tensor,
    replay_indices: torch.Tensor,
    max_cache_len: int,
    max_spec_len: int,
    fold_every_commit: bool = False,
    cache_buf_len: int | None = None,
    null_block_id: int = 0,
) -> None:
    """Moves the cursors over the accepted rows, and marks the rings that two more blocks would fill.

    Args:
        write_pos, cache_base: [R] int32; a `Ring`'s `lens` and `starts`. is_flush: [R] int8, the marks.
        num_accepted, replay_indices: [B]; accepted rows, and the rings.
        max_cache_len: L. max_spec_len: rows of a block. fold_every_commit: every ring is marked.
        cache_buf_len, null_block_id: of other callers.
    """
    assert cache_buf_len is None and null_block_id < 0, (cache_buf_len, null_block_id)
    lens = write_pos[replay_indices] + num_accepted.to(write_pos.dtype)
    write_pos[replay_indices] = lens
    full = lens > 0 if fold_every_commit else lens + 2 * max_spec_len > max_cache_len
    is_flush[replay_indices] = full.to(is_flush.dtype)


@hook(STORE, REPLACE, why=_WHY, until=_UNTIL)
def store(
    *,
    checkpoint_state: torch.Tensor,
    d_cache: torch.Tensor,
    k_cache: torch.Tensor,
    g_cache: torch.Tensor,
    d_residual_cache: torch.Tensor | None,
    k_residual_cache: torch.Tensor | None,
    state_batch_indices: torch.Tensor,
    replay_indices: torch.Tensor,
    write_pos: torch.Tensor,
    cache_base: torch.Tensor,
    is_flush: torch.Tensor,
    accept_lens: torch.Tensor,
    mamba_track_indices: torch.Tensor | None = None,
    mamba_steps_to_track: torch.Tensor | None = None,
    null_block_id: int = -1,
) -> None:
    """Stores the states of marked rings, which it empties, and the states that the prefix cache keeps.

    Args:
        checkpoint_state: [layers, S, H, V, K], the stored states. d_cache to k_residual_cache: a `Ring`'s tensors,
            each of all layers.
        state_batch_indices, replay_indices: [B]; places of the requests' states, and their rings.
        write_pos, cache_base, is_flush: as in `advance`, which has run.
        accept_lens: [B]; rows that it has added.
        mamba_track_indices, mamba_steps_to_track: [B] or None; place and row of a snapshot; a row of -1: none.
        null_block_id: of an unused place; all places are used.
    """
    places, lens = state_batch_indices.long(), write_pos[replay_indices].long()
    full = (is_flush[replay_indices] != 0).nonzero()[:, 0]
    moves = [(full, places[full], lens[full])]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        kept = (mamba_steps_to_track >= 0).nonzero()[:, 0]
        counts = lens[kept] - accept_lens[kept] + mamba_steps_to_track[kept] + 1
        moves.insert(0, (kept, mamba_track_indices[kept].long(), counts))  # before the stored states change
    for layer, states in enumerate(checkpoint_state):
        ring = Ring(
            updates=d_cache[layer],
            keys=k_cache[layer],
            low_updates=None if d_residual_cache is None else d_residual_cache[layer],
            low_keys=None if k_residual_cache is None else k_residual_cache[layer],
            decays=g_cache[layer],
            lens=write_pos,
            starts=cache_base,
        )
        for requests, targets, counts in moves:
            after = ring.after(states[places[requests]], replay_indices[requests], counts)
            states[targets] = after.to(states.dtype)
    emptied = replay_indices[full]
    cache_base[emptied] = (cache_base[emptied] + write_pos[emptied]) % d_cache.shape[-2]
    write_pos[emptied] = 0
    is_flush[emptied] = 0


@hook(STORE_WINDOWS, REPLACE, why=_WHY, until=_UNTIL)
def store_windows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Stores, of each request, the window of inputs after a row.

    Args:
        dst: [layers, S, C, N - 1]. src: [layers, P, W, C, N - 1].
        dst_indices_raw, step_indices_raw: [B]; place and row; a row of -1: none.
        src_indices_raw: [B] int64, places in `src`; None: 0 to B - 1.
    """
    requests = (step_indices_raw >= 0).nonzero()[:, 0]
    source = requests if src_indices_raw is None else src_indices_raw[requests]
    dst[:, dst_indices_raw[requests].long()] = src[:, source, step_indices_raw[requests].long()]
