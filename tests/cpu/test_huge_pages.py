"""Weights keep their values, identity and sharing when they move to huge pages."""

from __future__ import annotations

import gc
import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sglang_cpu.ops import huge_pages

PAGE = 2 << 20
pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages on demand")
given = pytest.mark.skipif(huge_pages.page_bytes() != PAGE, reason="this kernel gives no huge pages of 2 MiB")


class Model(torch.nn.Module):
    """Weights of several dtypes: one is transposed, one is tied, and two are parts of one storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(7, 5))
        self.head = self.embed
        self.tied = torch.nn.Parameter(self.embed.data)
        self.turned = torch.nn.Parameter(torch.randn(3, 11).t())
        self.brief = torch.nn.Parameter(torch.randn(13).bfloat16())
        fused = torch.randn(6, 4)
        self.first, self.second = torch.nn.Parameter(fused[:2]), torch.nn.Parameter(fused[2:])
        self.counts = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))


def test_values_strides_and_identity_stay() -> None:
    """Fails where a weight has other values or strides, or is another object, after the move."""
    model = Model()
    before = {name: (weight, weight.detach().clone(), weight.stride()) for name, weight in model.named_parameters()}
    moved, _ = huge_pages.move(model.parameters(), PAGE)
    assert moved >= sum(weight.nbytes for weight in model.parameters()) - model.tied.nbytes
    for name, weight in model.named_parameters():
        same, values, stride = before[name]
        assert weight is same
        assert weight.dtype == values.dtype
        assert weight.stride() == stride
        assert torch.equal(weight, values)


def test_weights_lie_side_by_side_on_huge_pages() -> None:
    """Fails where weights do not move, the region does not begin at a page, or two weights overlap."""
    model = Model()
    huge_pages.move(model.parameters(), PAGE)
    addresses = [weight.untyped_storage().data_ptr() for weight in model.parameters() if weight.numel()]
    assert len(set(addresses)) == 1
    spans = sorted({(w.data_ptr(), w.data_ptr() + w.nbytes) for w in model.parameters() if w.numel()})
    assert spans[0][0] % PAGE == 0
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(begin % huge_pages.ALIGNMENT == 0 for begin, _ in spans if begin != model.second.data_ptr())


def test_what_was_shared_is_shared() -> None:
    """Fails where a tied weight becomes two, and an update of one does not change the other."""
    model = Model()
    huge_pages.move(model.parameters(), PAGE)
    assert model.tied.data_ptr() == model.embed.data_ptr()
    model.embed.data.fill_(3.0)
    assert bool((model.tied == 3.0).all())
    assert model.second.data_ptr() == model.first.data_ptr() + model.first.nbytes


def test_storages_of_one_address_keep_apart() -> None:
    """Fails where two storages at one address get only the space of the shorter one."""
    memory = bytearray(range(64))
    short, long = (torch.frombuffer(memory, dtype=torch.uint8, count=count) for count in (8, 64))
    other = torch.full((16,), 7, dtype=torch.uint8)
    huge_pages.move([short, long, other], PAGE)
    assert long.tolist() == list(range(64))
    assert other.tolist() == [7] * 16


def test_a_weight_outlives_its_model() -> None:
    """Fails where the region is freed while a tensor in it is alive."""
    model = Model()
    expected = model.turned.detach().clone()
    huge_pages.move(model.parameters(), PAGE)
    kept = model.turned
    del model
    gc.collect()
    assert torch.equal(kept, expected)
    kept.data.zero_()


@given
def test_the_kernel_gives_huge_pages() -> None:
    """Fails where the kernel is not asked for huge pages, or their number is not read."""
    model = torch.nn.Linear(1024, 2048)  # four pages of weights
    moved, huge = huge_pages.move(model.parameters(), PAGE)
    assert moved >= 4 * PAGE
    assert PAGE <= huge <= moved


def test_huge_pages_of_a_mapping(tmp_path: Path) -> None:
    """Fails where the huge pages of another mapping are counted."""
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonHugePages:      2048 kB\nVmFlags: rd\n"
        "2000-3000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:      4096 kB\n"
    )
    assert huge_pages._on_huge_pages(0x2000, smaps) == 4096 << 10
    assert huge_pages._on_huge_pages(0x1FFF, smaps) == 2048 << 10
    assert huge_pages._on_huge_pages(0x3000, smaps) == 0
    assert huge_pages._on_huge_pages(0x2000, tmp_path / "none") == 0


def test_a_model_without_weights() -> None:
    """Fails where a model without weights raises."""
    assert huge_pages.move([], PAGE) == (0, 0)
    assert huge_pages.move([torch.empty(0)], PAGE) == (0, 0)


@pytest.mark.parametrize(
    ("enabled", "size", "variable", "expected"),
    [
        ("always [madvise] never", "2097152\n", None, PAGE),
        ("[always] madvise never", "2097152\n", "1", PAGE),
        ("always madvise [never]", "2097152\n", None, None),
        ("always [madvise] never", "2097152\n", "0", None),
        ("always [madvise] never", "many\n", None, None),
        ("always [madvise] never", "536870912\n", None, None),
        (None, None, None, None),
    ],
)
def test_whether_there_are_pages(
    enabled: str | None,
    size: str | None,
    variable: str | None,
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails where huge pages are requested from a kernel that gives none, or whose pages are too large."""
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(huge_pages.VARIABLE, variable)
    if enabled is not None and size is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(size)
    assert huge_pages.page_bytes(tmp_path) == expected
