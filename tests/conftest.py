"""What all tests share: servers run uncompiled where a test does not ask, because compiling takes seconds a start; the
native ops are built before any test is collected; tests that share a server run in one process, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_cpu.ops import native

WITH_SERVERS = {
    "e2e",
    "families",
    "rehearsal",
    "checking",
    "doctor",
}  # the folders where scripts/test.sh looks for such tests

os.environ.setdefault("SGLANG_DFLASH_COMPILE", "0")


def pytest_configure(config: pytest.Config) -> None:
    """Tests ask for the native ops while they are imported. Servers on a GPU do without, so none are built there."""
    if not torch.cuda.is_available():
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            native.build(lambda line: print(line, file=sys.stderr, flush=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Groups tests with servers for `--dist loadgroup`: those of an arm, of all files, else those of a file.

    The first group needs the baseline. Those that need none come next: the other process works on them while the first
    one asks the off arms.
    """
    for item in items:
        if item.get_closest_marker("server"):
            folder = item.path.relative_to(Path(__file__).parent).parts[0]
            assert folder in WITH_SERVERS, f"scripts/test.sh does not look for tests with servers in tests/{folder}"
            if not item.get_closest_marker("xdist_group"):
                arm = getattr(item, "callspec", None) and item.callspec.params.get("server")
                item.add_marker(pytest.mark.xdist_group(f"arm {arm}" if arm else item.location[0]))
    yield  # pytest orders tests by their fixtures; xdist reads the groups and renames the tests: their hash changes
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("server"):
            groups.setdefault(item.get_closest_marker("xdist_group").args[0], []).append(item)
    asking = [name for name, own in groups.items() if any("baseline" in item.fixturenames for item in own)]
    order = [*asking[:1], *(name for name in groups if name not in asking), *asking[1:]]
    items[:] = [item for item in items if not item.get_closest_marker("server")]
    items += [item for name in order for item in groups[name]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails where xdist does not read the groups: then both processes start each server."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped), "this pytest and this xdist do not fit together"


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Torch's threads spin between tiny tensors, which makes such tests twenty times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
