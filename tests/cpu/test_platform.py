"""When our CPU platform is active; and what counts as a missing hook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import sglang_cpu
from sglang_cpu.detect import activate_platform, cpu_platform_active
from sglang_cpu.hooks import platform_hooks
from sglang_dflash.host.start import hook_table, hooks
from sglang_dflash.host.start.version import builtin_worker_requested
from sglang_dflash.serving import TINY_TARGET

# Resolves server arguments as the launcher does. A case is a value of SGLANG_DFLASH_OVERLAP and flags.
RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args
overlaps = []
for variable, flags in json.loads(sys.argv[1]):
    os.environ["SGLANG_DFLASH_OVERLAP"] = variable
    arguments = prepare_server_args(flags)
    arguments.resolve_once()
    overlaps.append(not resolved_view(arguments).disable_overlap_schedule)
print(json.dumps(overlaps))
"""


@pytest.fixture(autouse=True)
def fresh_detection():
    cpu_platform_active.cache_clear()
    yield
    cpu_platform_active.cache_clear()


def test_active_without_an_accelerator(monkeypatch):
    """Fails where a machine without an accelerator gets no platform."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert activate_platform() == "sglang_cpu.platform.CpuPlatform"


def test_inactive_beside_an_accelerator(monkeypatch):
    """Fails where our CPU platform is active on a GPU machine."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert activate_platform() is None


def test_inactive_where_the_hosts_cpu_engine_is_asked_for(monkeypatch):
    """Fails where SGLANG_USE_CPU_ENGINE=1 does not give SGLang's own AMX engine."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert activate_platform() is None


def test_builtin_switch_keeps_our_worker_out(monkeypatch):
    """Fails where our worker or our refusals stay hooked with the switch."""
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "builtin")
    assert builtin_worker_requested()
    assert not {hooks.CREATE_WORKER, hooks.VALIDATE_REQUEST} & set(hooks.registered_hooks())


def test_every_hook_is_declared_once_and_listed():
    """Fails where a module declares a hook and `hooks` does not look there, or two hooks have one target."""
    listed = [hook.target for hook in (*hooks.worker_hooks(), *platform_hooks())]
    folders = Path(hooks.__file__).parents[1], Path(sglang_cpu.__file__).parent
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    assert len(listed) == sum(len(re.findall(r"^@hook\(", source, flags=re.MULTILINE)) for source in sources)
    assert len(set(listed)) == len(listed)


def test_the_table_explains_every_hook(capsys):
    """Fails where the command leaves out a hook, or a hook does not say why it is there or when it can go."""
    hook_table.main()
    printed = capsys.readouterr().out
    for hook in (*hooks.worker_hooks(), *platform_hooks()):
        assert len(hook.why.split()) >= 2, hook
        assert hook.until.strip(), hook
        assert f"{hook.target}\n    {hook.kind} " in printed
        assert f"    why: {hook.why}\n    until: {hook.until}\n" in printed
    assert re.search(rf"{hooks.CREATE_WORKER}\n.* host.start.hooks._create_worker, with our worker\n", printed)
    assert re.search(r" host.start.hooks._row_headroom, with either worker\n", printed)
    assert re.search(r" sglang_cpu.shims.get_last_loc, on our CPU platform, with either worker\n", printed)


@pytest.fixture
def registered(monkeypatch):
    """SGLang's hook registry as it is after a correct start."""
    ours = hooks.registered_hooks()
    entries = {target: [(HookType[hook.kind], hook.function, None)] for target, hook in ours.items()}
    monkeypatch.setattr(HookRegistry, "_hooks", entries)
    monkeypatch.setattr(HookRegistry, "_patched", set(ours))
    return entries


def test_a_hook_that_did_not_take_is_missing(registered, monkeypatch):
    """Fails where a target that SGLang could not patch counts as hooked."""
    assert hooks.missing_hooks() == []
    monkeypatch.setattr(HookRegistry, "_patched", set(registered) - {hooks.CREATE_WORKER})
    assert hooks.missing_hooks() == [hooks.CREATE_WORKER]
    with pytest.raises(SystemExit, match="create_worker"):
        hooks.require_hooks()


def test_a_hook_replaced_by_another_plugin_is_missing(registered):
    """Fails where another plugin's later replacement of our request check goes unnoticed."""
    registered[hooks.VALIDATE_REQUEST].append((HookType.REPLACE, lambda req, overlap: None, None))
    assert hooks.missing_hooks() == [hooks.VALIDATE_REQUEST]


def test_no_overlap_unless_asked_for():
    """Fails where overlap is on by default on a CPU, or a setting that switches it on or off is ignored."""
    outcomes = {
        ("0", ""): False,
        ("1", ""): True,
        ("1", "--disable-overlap-schedule"): False,
        ("0", "--enable-prefill-delayer"): True,
    }
    base = ["--device", "cpu", "--model-path", str(TINY_TARGET)]
    cases = [(variable, [*base, *flag.split()]) for variable, flag in outcomes]
    command = [sys.executable, "-c", RESOLVE, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == list(outcomes.values())
