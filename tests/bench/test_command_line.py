"""Options of the command line: their meaning, and the messages that refuse wrong values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fakes
import pytest

from sglang_dflash.bench.records import Run
from sglang_dflash.cli import benchmark, benchmark_run
from sglang_dflash.cli.benchmark_options import LEFT, Options, check_resumable
from sglang_dflash.cli.benchmark_plan import make_plan
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.serving.endpoint import Sampling


def options(**changes: Any) -> Options:
    return Options(**changes)


def test_the_command_line_people_know(monkeypatch):
    """Fails where a flag of the known command is missing, or means something else."""
    seen: dict[str, Options] = {}
    monkeypatch.setattr(benchmark_run, "sweep", lambda given, began_s: seen.update(options=given) or 0)
    words = (
        "benchmark_sglang.py --target-model Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16 "
        "--concurrencies 1,4,8,16,32 --dataset-name math500 --attention-backends fa3,flashinfer --tp-size 1 "
        "--output-md sglang_results.md"
    )
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as end:
        benchmark.run()
    assert end.value.code == 0
    given = seen["options"]
    assert given.loads() == (1.0, 4.0, 8.0, 16.0, 32.0)
    assert given.backends() == ("fa3", "flashinfer")
    assert given.arm_names() == ["off", "dflash"]
    assert (given.dataset_name, given.tp_size, given.output_md) == ("math500", 1, Path("sglang_results.md"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_model": "x"}, "--target-model and --draft-model belong together"),
        ({"arms": "off,eagle4"}, "--arms has eagle4; it must be one of off, dflash"),
        ({"arms": "eagle3"}, "--eagle3-draft"),
        ({"arms": "vllm"}, "--vllm-python"),
        ({"arms": ""}, "--arms is empty"),
        ({"arms": "transformers", "workload": "agent"}, "--workload closed"),
        ({"arms": "transformers", "recommended_sampling": True}, "--top-k 20; this arm supports only"),
        ({"workload": "agent-open-loop"}, "--workload agent-open-loop has left the benchmark: agent plays"),
        ({"workload": "burst"}, "--workload has burst; it must be one of closed, open-loop, agent."),
        ({"interleave": True, "together": True}, "--interleave and --together exclude each other"),
        ({"radix_cache": "maybe"}, "--radix-cache has maybe"),
        ({"concurrencies": "1,two"}, "--concurrencies is 1,two"),
        ({"concurrencies": "0"}, "--concurrencies is 0"),
        ({"workload": "open-loop", "request_rate": "-1"}, "--request-rate is -1"),
        ({"workload": "open-loop", "request_rate": ""}, "--request-rate is ;"),
        ({"repeats": 0}, "--repeats is 0; it must be at least 1"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_k": 0}, "--top-k is 0; it must be at least 1"),
        ({"temperature": 1.0, "recommended_sampling": True}, "--temperature is 1.0, but --recommended-sampling sets"),
        ({"stall_s": 0.0}, "--stall-s is 0.0"),
        ({"budget_s": 0.0}, "--budget-s is 0.0; it must be more than 0"),
        ({"budget_s": float("nan")}, "--budget-s is nan"),
        ({"base_url": ["http://localhost"]}, "--base-url is http://localhost; it must be NAME="),
        ({"base_url": ["off=http://localhost"]}, "--base-url is off=http://localhost"),
        ({"arm_flags": ["--flag"]}, "--arm-flags is --flag"),
        ({"env": ["X"]}, "--env is X"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"workload": "open-loop", "request_rate": "inf"}, "--request-rate is inf"),
        ({"base_url": ["x=http://localhost:notaport"]}, "--base-url is x=http://localhost:notaport"),
        ({"arm_flags": ["transformers=--x"]}, "takes no flags"),
        ({"output_md": Path("x.json")}, "--output-md is x.json"),
        ({"dataset_name": ","}, "--dataset-name is empty"),
        ({"env": ["other:X=1"]}, "--env is other:X=1"),
    ],
)
def test_wrong_words_are_refused(changes, said):
    """Fails where a wrong value is accepted, or the message does not name it."""
    with pytest.raises(ValueError, match=re.escape(said)):
        options(**changes)


def test_no_words_run_the_embedded_pair():
    """Fails where the defaults are not the embedded pair, its three kinds of prompts, and the arms off and dflash."""
    plan = make_plan(options())
    assert [arm.name for arm in plan.arms] == ["off", "dflash"]
    assert [arm.name for arm in make_plan(options(arms="dflash,off")).arms] == ["off", "dflash"]
    assert list(plan.datasets) == ["arithmetic", "code", "chat"]
    assert plan.counts == {1.0: 16, 2.0: 16, 4.0: 16, 8.0: 32}
    off, on = plan.arms
    assert str(TINY_TARGET) in off.arguments and "--speculative-algorithm" not in off.arguments
    assert str(TINY_DRAFT) in on.arguments
    assert plan.sampling.max_new_tokens == 128


@pytest.mark.parametrize(
    ("workload", "loads", "counts"),
    [
        ("closed", (1, 2, 4, 8), (16, 16, 16, 32)),
        ("open-loop", (1, 2, 4), (32, 32, 64)),
        ("agent", (1, 2, 4, 8), (4, 4, 8, 16)),
    ],
)
def test_every_workload_has_its_loads(workload, loads, counts):
    """Fails where an open loop reads --concurrencies, or a workload plays sessions or answers of another one."""
    plan = make_plan(options(workload=workload, dataset_name="code"))
    assert (plan.loads, tuple(plan.counts.values())) == (loads, counts)
    agent, open_loop = workload == "agent", workload == "open-loop"
    assert {len(session.turns) > 1 for session in plan.datasets["code"]} == {agent}
    assert plan.sampling.max_new_tokens == (96 if agent else 128)
    given = options(workload=workload, request_rate="0.1,3", concurrencies="5", dataset_name="code")
    assert given.loads() == ((0.1, 3) if open_loop else (5,))


def test_sampling_is_greedy_given_or_recommended():
    """Fails where a flag does not reach the requests, or the recommendation is not 0.6, 0.95 and 20."""
    assert options().sampling(7) == Sampling(7, seed=0)
    given = options(temperature=0.8, top_p=0.9, top_k=40, seed=3, ignore_eos=True)
    assert given.sampling(7) == Sampling(7, 0.8, 0.9, 40, 3, True)
    assert options(recommended_sampling=True).sampling(7) == Sampling(7, 0.6, 0.95, 20, 0)
    fields = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    recommended = Sampling(7, **fields, seed=4)
    assert recommended.fields("sglang", 5) == {"max_new_tokens": 5, **fields, "sampling_seed": 4}
    assert recommended.fields("vllm", 9) == {"max_tokens": 7, **fields, "seed": 4}
    assert Sampling(7, top_k=20, seed=4).fields("sglang", 9) == {"max_new_tokens": 7, "temperature": 0.0}


def test_every_arm_gets_its_command():
    """Fails where an arm is started with another arm's flags, drafts or environment."""
    given = options(
        arms="off,builtin,eagle3,standalone,ngram,transformers,vllm,vllm-off",
        eagle3_draft="e3",
        standalone_draft="small",
        vllm_python="/v/python",
        attention_backends="triton,fa3",
        radix_cache="both",
        arm_flags=["eagle3=--speculative-num-steps 3"],
        env=["A=1", "vllm:B=2"],
        draft_tokens=6,
        base_url=["theirs=http://127.0.0.1:1/v1/"],
    )
    plan = make_plan(given)
    arms = {arm.name: arm for arm in plan.arms}
    assert len(plan.arms) == 5 * 4 + 1 + 2 * 2 + 1
    assert {(arm.backend, arm.radix) for arm in plan.arms if arm.name == "off"} == {
        (backend, radix) for backend in ("triton", "fa3") for radix in (True, False)
    }
    assert "--disable-radix-cache" in arms["off"].arguments  # the last of its variants
    assert arms["builtin"].environment["SGLANG_DFLASH_WORKER"] == "builtin"
    assert arms["eagle3"].arguments[-6:] == (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "e3"),
        *("--speculative-num-steps", "3"),
    )
    assert arms["ngram"].arguments[-2:] == ("--speculative-algorithm", "NGRAM")
    words = arms["vllm"].arguments
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "dflash", "model": str(TINY_DRAFT), "num_speculative_tokens": 5}
    assert arms["vllm"].launch[0] == "/v/python"
    assert (arms["vllm"].environment["B"], arms["off"].environment.get("B")) == ("2", None)
    assert all(arm.environment["A"] == "1" for arm in plan.arms if not arm.url)
    assert arms["transformers"].arguments[-2:] == ("--block-size", "6")
    assert arms["theirs"].url == "http://127.0.0.1:1"


def test_interleaved_arms_take_turns(tmp_path):
    """Fails where a repeat of one arm is not followed by the same repeat of the other arm."""
    arms = fakes.fake_arm("off"), fakes.fake_arm("dflash")
    order = fakes.make_plan(tmp_path, *arms, loads=(1.0,), repeats=2, interleave=True).servers(set())
    assert [(arm.name, [one.repeat for one in keys]) for arm, keys in order] == [
        *(("off", [0]), ("dflash", [0]), ("off", [1]), ("dflash", [1])),
    ]


def test_vllm_gets_what_its_instructions_ask_for(tmp_path):
    """Fails where vLLM is measured without Intel's OpenMP although its environment has it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    plan = make_plan(options(arms="vllm", vllm_python=str(tmp_path / "bin" / "python")))
    assert plan.arms[0].environment["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_only_the_same_run_is_resumed():
    """Fails where cells of different options would share a table, or more arms and repeats are refused."""
    held = options().to_json({"code": "a"})
    check_resumable(
        "closed", options(arms="off,dflash,builtin", repeats=3).to_json({"code": "a", "chat": "b"}), "closed", held
    )
    with pytest.raises(ValueError, match=r"the sampling \(--temperature"):
        check_resumable("closed", options(temperature=1.0).to_json({"code": "a"}), "closed", held)
    with pytest.raises(ValueError, match="--concurrencies"):
        check_resumable("closed", options(concurrencies="16").to_json({"code": "a"}), "closed", held)
    with pytest.raises(ValueError, match="the content of --dataset-name"):
        check_resumable("closed", options().to_json({"code": "other"}), "closed", held)
    with pytest.raises(ValueError, match="--workload is agent"):
        check_resumable("agent", held, "closed", held)


def test_flags_that_left_are_hidden_and_name_what_does_their_work(monkeypatch, capsys):
    """Fails where one ends in a usage error without its successor, or is offered by --help."""
    for name, successor in LEFT.items():
        flag = f"--{name.replace('_', '-')}"
        monkeypatch.setattr("sys.argv", ["benchmark_sglang.py", flag, *["x"] * (name != "no_warm_up")])
        with pytest.raises(SystemExit) as end:
            benchmark.run()
        assert end.value.code == 2
        assert capsys.readouterr().err == f"error: {flag} has left the benchmark: {successor}.\n"
    monkeypatch.setattr("sys.argv", ["benchmark_sglang.py", "--help"])
    with pytest.raises(SystemExit):
        benchmark.run()
    assert "--tool-call-parser" not in capsys.readouterr().out


def test_a_finished_run_is_not_overwritten_by_accident(tmp_path, monkeypatch, capsys):
    """Fails where giving the same command twice overwrites finished measurements."""
    Run("test", "closed", {}).save(tmp_path / "results.json")
    monkeypatch.setattr("sys.argv", ["benchmark_sglang.py", "--output-md", str(tmp_path / "results.md")])
    with pytest.raises(SystemExit) as end:
        benchmark.run()
    assert end.value.code == 2
    assert "--resume continues it, --overwrite replaces it" in capsys.readouterr().err


def test_a_run_whose_budget_is_over_can_be_resumed(tmp_path, monkeypatch, capsys):
    """Fails where such a run writes nothing, is an error, or does not say what is missing; or cannot be resumed."""
    plan = fakes.make_plan(tmp_path, fakes.fake_arm("off"), fakes.fake_arm("dflash"))
    monkeypatch.setattr(benchmark_run, "make_plan", lambda _: plan)
    monkeypatch.setattr(benchmark_run, "Renderer", lambda *_: fakes.render)

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr("sys.argv", ["benchmark_sglang.py", "--output-md", str(tmp_path / "r.md"), *words])
        with pytest.raises(SystemExit) as end:
            benchmark.run()
        out, err = capsys.readouterr()
        return end.value.code, json.loads(out.splitlines()[-1]), err

    code, said, err = run("--budget-s", "0.001")
    assert (code, said["cells"], said["missing"]) == (0, 0, 4)
    assert "--budget-s 0.001 is over: 4 cells are missing (2 of off, 2 of dflash); --resume measures them" in err
    assert "Nothing was measured." in (tmp_path / "r.md").read_text()
    code, said, err = run("--budget-s", "600", "--resume")
    assert (code, said["cells"], said["missing"]) == (0, 4, 0) and "missing" not in err
    assert run("--resume", "--budget-s", "0.001")[:2] == (0, said)


def test_the_results_go_to_standard_output(tmp_path, monkeypatch, capsys):
    """Fails where `--json -` makes a file of that name, or standard output is more than the results' JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_run, "make_plan", lambda _: fakes.make_plan(tmp_path, fakes.fake_arm("off")))
    monkeypatch.setattr(benchmark_run, "Renderer", lambda *_: fakes.render)
    monkeypatch.setattr("sys.argv", ["benchmark_sglang.py", "--budget-s", "0.001", "--json", "-"])
    with pytest.raises(SystemExit):
        benchmark.run()
    assert json.loads(capsys.readouterr().out)["cells"] == [] and not Path("-").exists()
