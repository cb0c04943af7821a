"""The target's context features on disk: computed once, used in every epoch and by every later run."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch
import torch.nn.functional as F

from sglang_dflash.training.frozen import FrozenTarget

_Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sample's features stand: tokens [start, end) of a file."""

    file: Path
    start: int
    end: int


class FeatureCache:
    """Features in bfloat16, found by a sample's token ids; samples that are not there are computed and added.

    A folder serves any data, target and taps: each target with its taps has a subfolder. Each process writes a pair of
    files of its own, NAME.features and NAME.index, and reads those of all.
    """

    def __init__(self, folder: Path, target: FrozenTarget, taps: Sequence[int]) -> None:
        """
        Raises:
            ValueError: the folder cannot be written to.
        """
        self._target, self._taps = target, tuple(taps)
        self._width = len(self._taps) * target.config.hidden_size
        self.folder = folder / target.digest(self._taps)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--cache {folder} cannot be written to: {error.strerror}.") from None
        self._own: tuple[BinaryIO, TextIO] | None = None  # features and index, once there is something to write
        self._end = 0
        self._mapped: dict[Path, np.ndarray[Any, Any]] = {}
        self._places: dict[str, _Place] = {}
        self._read_to: dict[Path, int] = {}
        self._refresh()

    @property
    def _token_bytes(self) -> int:
        return self._width * 2

    def _refresh(self) -> None:
        """Reads what other processes have written since the last time."""
        for index in sorted(self.folder.glob("*.index")):
            file = index.with_suffix(".features")
            tokens = file.stat().st_size // self._token_bytes
            with index.open() as lines:
                lines.seek(self._read_to.get(index, 0))
                while (line := lines.readline()).endswith("\n"):  # else its process is writing it, or was stopped
                    key, start, end = line.split()
                    if int(end) > tokens:
                        break
                    self._places.setdefault(key, _Place(file, int(start), int(end)))
                    self._read_to[index] = lines.tell()

    def check_space(self, samples: Iterable[Sequence[int]]) -> int:
        """The bytes that the samples' token ids still need.

        Raises:
            ValueError: the disk has not as many.
        """
        lengths = {_key(ids): len(ids) for ids in samples}
        missing = sum(length for key, length in lengths.items() if key not in self._places) * self._token_bytes
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise ValueError(
                f"--cache {self.folder.parent} needs {missing / 1e9:.1f} GB for the features of {len(lengths):,} "
                f"samples, and {free / 1e9:.1f} GB are free; give fewer --taps or less data, or leave it out."
            )
        return missing

    def features(self, samples: Sequence[_Sample], ids: torch.Tensor) -> torch.Tensor:
        """Context features [B, T, taps * H] of a batch; zeros behind a sample's end.

        Args:
            ids: [B, T] int64; the samples' ids, padded on the right.
        """
        rows = [sample["input_ids"] for sample in samples]
        keys = list(map(_key, rows))
        if not self._places.keys() >= set(keys):
            self._refresh()
        missing = [row for row, key in enumerate(keys) if key not in self._places]
        if missing:
            computed = self._target.features(ids[missing], self._taps).to("cpu", torch.bfloat16)
            for row, features in zip(missing, computed, strict=True):
                self._add(keys[row], features[: len(rows[row])])
        stored = map(self._stored, keys)
        return torch.stack([F.pad(one, (0, 0, 0, ids.shape[1] - len(one))) for one in stored]).to(ids.device)

    def _add(self, key: str, features: torch.Tensor) -> None:
        if key in self._places:  # twice in one batch
            return
        if self._own is None:
            own = self.folder / uuid.uuid4().hex
            self._own = own.with_suffix(".features").open("wb"), own.with_suffix(".index").open("w")
        file, index = self._own
        start, self._end = self._end, self._end + len(features)
        file.write(features.contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        index.write(f"{key} {start} {self._end}\n")  # behind the features: who reads the line finds them
        index.flush()
        self._places[key] = _Place(Path(file.name), start, self._end)

    def close(self) -> None:
        for file in self._own or ():
            file.close()

    def _stored(self, key: str) -> torch.Tensor:
        place = self._places[key]
        mapped = self._mapped.get(place.file)
        if mapped is None or len(mapped) < place.end:  # a file may grow
            tokens = place.file.stat().st_size // self._token_bytes
            mapped = self._mapped[place.file] = np.memmap(place.file, np.int16, "r", shape=(tokens, self._width))
        return torch.from_numpy(mapped[place.start : place.end].copy()).view(torch.bfloat16)


def _key(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:32]
