"""Penalties over the rows of a verified block: each row counts the drafts before it as emitted."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class PenaltyParams(NamedTuple):
    """Penalty parameters of P requests.

    Fields:
        frequency, presence, repetition: [P] float32; 0, 0 and 1 mean no penalty.
        min_new_tokens: [P] int64.
        stop_ids: [P, S] int64; masked until `min_new_tokens` tokens are emitted. Shorter lists repeat one of their ids.
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new_tokens: torch.Tensor
    stop_ids: torch.Tensor


class Emitted(NamedTuple):
    """The tokens that P requests have emitted, the block's anchor included.

    Fields:
        ids: [P, L] int64; their tokens, in any order, repeated or not. They only select the logits to look at: `seen`
            tells which ids count. Padding may be any id.
        seen: [P, V] bool.
        sums: [P, V] float32; the frequency penalty, added once per occurrence, as SGLang's penalizer does.
        lens: [P] int64; numbers of tokens emitted.
    """

    ids: torch.Tensor
    seen: torch.Tensor
    sums: torch.Tensor
    lens: torch.Tensor


class BlockRows(NamedTuple):
    """Where the rows of P requests' blocks are, and what they hold.

    Fields:
        rows: [P, W] int64; of each place of a block its row of logits; of a place that is not verified, any.
        ids: [P, W] int64; anchor first, then the drafts; of a place that is not verified, any.
        lens: [P] int64; verified places.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def whole(cls, requests: torch.Tensor, ids: torch.Tensor) -> BlockRows:
        """Of requests ([P] int64) whose blocks are verified whole, as those of all others. ids: [P, W] int64."""
        columns = torch.arange(ids.shape[1], device=ids.device)
        return cls(requests[:, None] * ids.shape[1] + columns, ids, torch.full_like(requests, ids.shape[1]))


def penalize(logits: torch.Tensor, block: BlockRows, emitted: Emitted, params: PenaltyParams) -> None:
    """Applies the penalties in place: rows of P requests get the logits that plain decoding would sample from.

    In row i, drafts 1..i count as emitted. The arithmetic per logit is that of SGLang's penalizers: subtract the
    frequency sum, subtract the presence penalty, then divide (positive) or multiply (negative) by the repetition
    penalty. Stop ids are -inf while fewer than `min_new_tokens` tokens are emitted. Only the logits of emitted, drafted
    and stop ids change.

    Args:
        logits: [T, V] float32, with any strides: SGLang's may be a slice of a padded vocabulary.
    """
    width = block.ids.shape[1]
    columns = torch.arange(width, device=logits.device)
    verified = columns < block.lens[:, None]  # [P, W]
    # A place that is not verified writes the anchor's values to the anchor's row once more.
    rows = torch.where(verified, block.rows, block.rows[:, :1])[:, :, None]
    drafted = torch.where(verified, columns, 0)  # before the row's token
    entries = torch.cat((emitted.ids, block.ids), dim=1)  # [P, E]
    times = torch.where(verified[:, :, None], drafted_before(entries, block.ids), 0)
    seen = emitted.seen.gather(1, entries)[:, None] | (times > 0)
    sums = emitted.sums.gather(1, entries)[:, None].expand(times.shape)
    for time in range(width - 1):  # one addition per occurrence: the sum is rounded as SGLang's is
        sums = torch.where(times > time, sums + params.frequency[:, None, None], sums)
    presence = torch.where(seen, params.presence[:, None, None], 0.0)
    repetition = torch.where(seen, params.repetition[:, None, None], 1.0)

    where = (rows, entries[:, None])  # broadcast to [P, W, E]
    x = logits[where] - sums - presence
    logits[where] = torch.where(x < 0, x * repetition, x / repetition)  # equal entries write equal values

    too_short = emitted.lens[:, None] + drafted < params.min_new_tokens[:, None]  # [P, W]
    where = (rows, params.stop_ids[:, None])  # broadcast to [P, W, S]
    logits[where] = torch.where(too_short[:, :, None], float("-inf"), logits[where])


def penalties_of(emitted: Emitted, params: PenaltyParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The same penalties for one row per request, over the whole vocabulary, in the two parts that SGLang applies.

    Returns:
        additive: [P, V] float32, to be added to the logits; -inf at masked stop ids.
        scaling: [P, V] float32; the sum is then divided by it (positive) or multiplied with it (negative).
    """
    additive = -(emitted.sums + torch.where(emitted.seen, params.presence[:, None], 0.0))
    too_short = (emitted.lens < params.min_new_tokens)[:, None]
    masked = torch.where(too_short, float("-inf"), additive.gather(1, params.stop_ids))
    return additive.scatter(1, params.stop_ids, masked), torch.where(emitted.seen, params.repetition[:, None], 1.0)


def drafted_before(entries: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """How often each entry occurs among drafts 1..i, for every row i.

    Args:
        entries: [P, E] int64.
        block_ids: [P, W] int64.

    Returns:
        [P, W, E] int64.
    """
    equal = entries[:, None] == block_ids[:, 1:, None]  # [P, W-1, E]
    return F.pad(equal.long().cumsum(1), (0, 0, 1, 0))


class EmittedTokens:
    """The tokens that requests have emitted, one row each, kept on the device from step to step.

    Rows and columns are added as needed. `start` begins a row; only the next `start` replaces it. No method waits for
    the device.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._sums = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._lens = torch.zeros(0, dtype=torch.int64, device=device)
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=device)

    def _reserve(self, rows: int, columns: int) -> None:
        have_rows, have_columns = self._ids.shape
        if rows > have_rows or columns > have_columns:
            rows = max(have_rows, 2 * rows if rows > have_rows else 0)
            columns = max(have_columns, 2 * columns if columns > have_columns else 0)
            self._ids = F.pad(self._ids, (0, columns - have_columns, 0, rows - have_rows))
            self._seen = F.pad(self._seen, (0, 0, 0, rows - have_rows))
            self._sums = F.pad(self._sums, (0, 0, 0, rows - have_rows))
            self._lens = F.pad(self._lens, (0, rows - have_rows))

    def start(self, row: int, ids: torch.Tensor, frequency: float) -> None:
        """Sets the row to exactly `ids` ([N] int64, on the device)."""
        self._keep_ids(row, ids)
        # `fill_` and its kin, because an assignment of a Python number copies it from the CPU and waits.
        self._seen[row].zero_().index_fill_(0, ids, True)
        self._sums[row].zero_().scatter_add_(0, ids, self._sums.new_full(ids.shape, frequency))
        self._lens[row].fill_(len(ids))

    def _keep_ids(self, row: int, ids: torch.Tensor) -> None:
        """Makes room for the row, and stores the ids for this body's `of`."""
        self._reserve(row + 1, len(ids) + 1)
        self._ids[row, : len(ids)].copy_(ids)

    def append(
        self,
        requests: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lens: torch.Tensor,
        most: int,
        params: PenaltyParams,
    ) -> None:
        """Appends what P requests of a batch have emitted: of each, the first `lens` of its `ids`.

        Args:
            requests, rows: [P] int64, each at most once; the indices in the batch, and the rows here.
            ids: [B, W] int64; those beyond `lens` may be any id.
            lens: [B] int.
            most: bound, known on the CPU, of the tokens that any of these rows holds before.
        """
        ids, lens = ids[requests], lens[requests]
        width = ids.shape[1]
        self._reserve(0, most + width)
        columns = torch.arange(width, device=ids.device)
        valid = columns < lens[:, None]  # [P, W]
        # Ids beyond `lens` are stored, too. Later appends overwrite them; until then `seen` does not count them.
        self._ids[rows[:, None], self._lens[rows][:, None] + columns] = ids
        where = rows[:, None] * self._vocab_size + ids  # [P, W]
        self._seen.view(-1)[where] |= valid if width == 1 else _any_equal(ids, valid)
        self._sums.view(-1).scatter_add_(0, where.flatten(), (valid * params.frequency[:, None]).flatten())
        self._lens[rows] += lens.long()

    def penalize(
        self, logits: torch.Tensor, block: BlockRows, rows: torch.Tensor, most: int, params: PenaltyParams
    ) -> None:
        """The function `penalize` for P requests; `rows` and `most` as in `append`."""
        penalize(logits, block, self.of(rows, most), params)

    def of(self, rows: torch.Tensor, most: int) -> Emitted:
        """The tokens of `rows` ([P] int64); `most` as in `append`."""
        return Emitted(self._ids[rows, :most], self._seen[rows], self._sums[rows], self._lens[rows])


def _any_equal(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[P, W] bool: whether the row has an equal id that is valid. So all writes of one id agree."""
    return ((ids[:, :, None] == ids[:, None]) & valid[:, None]).any(-1)
