"""Features kept on disk against computed ones: batches, later runs, half-written files, other taps, a full disk."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training import feature_cache
from sglang_dflash.training.conversations import collate
from sglang_dflash.training.feature_cache import FeatureCache
from sglang_dflash.training.frozen import FrozenTarget
from sglang_dflash.training.trainer import Trainer, train

TAPS = (1, 3)
CPU = torch.device("cpu")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def frozen() -> FrozenTarget:
    return FrozenTarget(str(TINY_TARGET), "float32", CPU)


def _samples(*lengths: int) -> list[dict[str, Any]]:
    ids = torch.randint(1, 1700, (max(lengths), len(lengths)), generator=torch.Generator().manual_seed(2)).T.tolist()
    return [{"input_ids": row[:length], "spans": [[1, length]]} for row, length in zip(ids, lengths, strict=True)]


def _computed(frozen: FrozenTarget, samples: list[dict[str, Any]], ids: torch.Tensor) -> torch.Tensor:
    features = frozen.features(ids, TAPS).bfloat16()
    for row, sample in enumerate(samples):
        features[row, len(sample["input_ids"]) :] = 0
    return features


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a step of bfloat16: another batch rounds otherwise."""
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(found == 0, expected == 0)


def _closed(cache: FeatureCache) -> Path:
    cache.close()
    return cache.folder


def test_kept_features_are_the_computed_ones(frozen, tmp_path, monkeypatch):
    """Fails if a sample gets another's features, is computed twice, or a later run does not find it."""
    samples = _samples(9, 4, 17, 4)
    cache = FeatureCache(tmp_path, frozen, TAPS)
    for batch in (samples[:2], samples[1:], samples):
        ids, _ = collate(batch, CPU)
        _check(cache.features(batch, ids), _computed(frozen, batch, ids))
    folder = _closed(cache)
    (file,) = folder.glob("*.features")
    assert file.stat().st_size == 34 * 2 * frozen.config.hidden_size * 2

    monkeypatch.setattr(FrozenTarget, "features", None)  # nothing may be computed
    again = FeatureCache(tmp_path, frozen, TAPS)  # another process finds what the first one wrote
    monkeypatch.undo()
    ids, _ = collate(samples, CPU)
    expected = _computed(frozen, samples, ids)
    monkeypatch.setattr(FrozenTarget, "features", None)
    _check(again.features(samples, ids), expected)
    assert len(list(_closed(again).iterdir())) == 2  # it computed nothing, so it leaves nothing


def test_processes_share_what_they_compute(frozen, tmp_path, monkeypatch):
    """Fails if a process computes again what another one has written since both began."""
    samples = _samples(9, 6)
    one, other = (FeatureCache(tmp_path, frozen, TAPS) for _ in range(2))
    ids, _ = collate(samples, CPU)
    expected = one.features(samples, ids)
    monkeypatch.setattr(FrozenTarget, "features", None)
    assert torch.equal(other.features(samples, ids), expected)
    for cache in (one, other):
        cache.close()


def test_a_sample_twice_in_a_batch(frozen, tmp_path):
    """Fails if equal samples of a batch are written twice, or one of them stays empty."""
    batch = _samples(6) * 2
    cache = FeatureCache(tmp_path, frozen, TAPS)
    ids, _ = collate(batch, CPU)
    _check(cache.features(batch, ids), _computed(frozen, batch, ids))
    (index,) = _closed(cache).glob("*.index")
    assert len(index.read_text().splitlines()) == 1


def test_a_stopped_run_leaves_nothing_wrong(frozen, tmp_path):
    """Fails if half-written features or a half-written line of the index shift or replace those of other samples."""
    first, second = _samples(8, 8)
    cache = FeatureCache(tmp_path, frozen, TAPS)
    ids, _ = collate([first], CPU)
    cache.features([first], ids)
    folder = _closed(cache)
    (features,), (index,) = folder.glob("*.features"), folder.glob("*.index")
    with features.open("ab") as file:
        file.write(b"abc")
    with index.open("a") as file:
        file.write(f"{feature_cache._key(second['input_ids'])} 8 16\n{'e' * 32} 8")
    cache = FeatureCache(tmp_path, frozen, TAPS)
    for samples in ([second], [first, second]):
        ids, _ = collate(samples, CPU)
        _check(cache.features(samples, ids), _computed(frozen, samples, ids))
    cache.close()
    third = FeatureCache(tmp_path, frozen, TAPS)
    _check(third.features([first, second], ids), _computed(frozen, [first, second], ids))
    third.close()


def test_other_taps_and_other_weights_stand_apart(frozen, tmp_path):
    """Fails if a run finds features of other layers, of another precision, or of a target with other weights."""
    other = FrozenTarget(str(TINY_TARGET), "float32", CPU)
    other.model.get_input_embeddings().weight.data[:, 0] += 1
    half = FrozenTarget(str(TINY_TARGET), "bfloat16", CPU)
    digests = [frozen.digest(TAPS), frozen.digest((1, 4)), other.digest(TAPS), half.digest(TAPS)]
    assert len(set(digests)) == 4
    assert FrozenTarget(str(TINY_TARGET), "float32", CPU).digest(TAPS) == digests[0]


def test_too_small_a_disk_is_told_first(frozen, tmp_path, monkeypatch):
    """Fails if a run starts that will fill the disk, or counts what is there already."""
    samples = _samples(10, 20)
    cache = FeatureCache(tmp_path, frozen, TAPS)
    ids, _ = collate(samples[:1], CPU)
    cache.features(samples[:1], ids)
    bytes_of_20 = 20 * 2 * frozen.config.hidden_size * 2
    rows = [sample["input_ids"] for sample in samples]
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: Usage(0, 0, bytes_of_20))
    assert cache.check_space(rows) == bytes_of_20
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: Usage(0, 0, bytes_of_20 - 1))
    with pytest.raises(
        ValueError, match=r"--cache .* needs 0\.0 GB for the features of 2 samples, and 0\.0 GB are free"
    ):
        cache.check_space(rows)
    cache.close()


def test_a_folder_that_cannot_be_written_to(frozen, tmp_path):
    """Fails if a wrong --cache ends in a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--cache .*file cannot be written to: Not a directory"):
        FeatureCache(tmp_path / "file", frozen, TAPS)


def test_a_second_run_computes_nothing_and_learns_the_same(options, tmp_path, monkeypatch):
    """Fails if epochs or runs compute features again, or the cache changes what a run learns."""
    made = {"cache": str(tmp_path / "cache"), "max_steps": 4, "save_every": 4, "eval_every": 4}
    train(options(output=str(tmp_path / "first"), **made))
    monkeypatch.setattr(FrozenTarget, "features", None)
    train(options(output=str(tmp_path / "second"), **made))
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_resumed_run_may_use_another_cache(options, tmp_path):
    """Fails if the place of the cache keeps a run from going on, or a run goes on without the rounding of a cache."""
    made = options(cache=str(tmp_path / "one"), save_every=1)
    train(made)
    shutil.rmtree(tmp_path / "one")
    assert Trainer(options(cache=str(tmp_path / "two"), resume=True, save_every=1)).done == 2
    with pytest.raises(ValueError, match="made with other values of --cache"):
        Trainer(options(resume=True, save_every=1))
