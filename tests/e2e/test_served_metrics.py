"""What a server says of its drafts in `/metrics` and in its answers, and what a real Prometheus makes of it."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import yaml
from arms import MAX_NEW_TOKENS, Baseline, on_arms
from prometheus_client.parser import text_string_to_metric_families

from equality import BLOCK_SIZE
from sglang_dflash.core.step_counts import (
    ACCEPTED,
    BY_POSITION,
    DRAFT_KV,
    DRAFT_TOKENS,
    DRAFTS,
    PREFIX,
    REQUEST_STEPS,
    STEPS,
)
from sglang_dflash.serving import Client, Completion, Server
from tools.measure.dashboard import ask, panels

pytestmark = pytest.mark.server
PROMETHEUS = Path(__file__).parents[2] / "deploy/prometheus"


def read(client: Client) -> Counter[tuple[str, str]]:
    """The counters by name and by the value of their own label, over all replicas."""
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(client.get_text("/metrics")):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                own = sample.labels.get("position", sample.labels.get("width", ""))
                found[family.name.removeprefix(PREFIX), own] += round(sample.value)
    return found


def read_when_idle(client: Client) -> Counter[tuple[str, str]]:
    """An answer comes a little before the scheduler is idle, and writes."""
    before, deadline = read(client), time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = read(client)
        if now == before:
            return now
        before = now
    raise AssertionError(f"counts go on rising: {before}")


def expected(answers: Sequence[Completion]) -> dict[tuple[str, str], int]:
    """What the counters must say of these answers, by what each answer says of itself."""
    histograms = [answer.accept_histogram for answer in answers]
    positions = [sum(sum(one[place + 1 :]) for one in histograms) for place in range(BLOCK_SIZE - 1)]
    caps = [answer.meta.get("spec_cap_lens_histogram") or [0, 0, answer.steps] for answer in answers]
    return {
        (REQUEST_STEPS, ""): sum(answer.steps for answer in answers),
        (DRAFTS, ""): sum(sum(one[2:]) for one in caps),
        (DRAFT_TOKENS, ""): sum(answer.drafted for answer in answers),
        (ACCEPTED, ""): sum(answer.meta.get("spec_num_correct_drafts", 0) for answer in answers),
        (DRAFT_KV, ""): sum(answer.prompt_tokens - (answer.cached_tokens or 0) for answer in answers),
        **{(BY_POSITION, str(place)): count for place, count in enumerate(positions)},
    }


@on_arms("overlap", "replicas")
def test_counters_say_what_answers_say(client: Client, baseline: Baseline) -> None:
    """Fails where a step is counted twice or not at all, under overlap or on one of two replicas, with whole blocks or
    with chosen rows; where steps after a request's end count; or where counts wait for the next request."""
    before = read_when_idle(client)
    assert {place for name, place in before if name == BY_POSITION} == set(map(str, range(BLOCK_SIZE - 1)))
    assert {width for name, width in before if name == STEPS} == set(map(str, range(1, BLOCK_SIZE + 1)))
    answers = client.generate_all(baseline.prompts, 8, max_new_tokens=MAX_NEW_TOKENS)
    answers += [client.generate(baseline.prompts[0], max_new_tokens=1)]  # a prefill alone
    after = read_when_idle(client)
    wanted = expected(answers)
    assert {name: after[name] - before[name] for name in wanted} == wanted
    steps = {int(width): after[STEPS, width] - before[STEPS, width] for name, width in after if name == STEPS}
    longest, all_of_them = max(answer.steps for answer in answers), wanted[REQUEST_STEPS, ""]
    assert longest <= sum(steps.values()) <= all_of_them
    if not any("spec_cap_length" in answer.meta for answer in answers):  # whole blocks
        assert {width for width, count in steps.items() if count} == {BLOCK_SIZE}


@on_arms("replicas")
def test_proposed_drafts(client: Client, baseline: Baseline) -> None:
    """Fails where an answer counts drafts that were not verified, natively or from an OpenAI endpoint, or where the
    server's own accept rate is not that of verified drafts."""
    answers = client.generate_all(baseline.prompts, 4, max_new_tokens=MAX_NEW_TOKENS)
    plain = [answer for answer in answers if answer.drafted < answer.steps * (BLOCK_SIZE - 1)]
    assert plain, "all steps were whole blocks"
    for answer in answers:
        proposed, accepted = answer.meta["spec_num_proposed_drafts"], answer.meta["spec_num_correct_drafts"]
        assert proposed == answer.drafted
        assert answer.meta["spec_accept_rate"] == pytest.approx(accepted / proposed if proposed else 0.0)
    body = {
        "model": "any",
        "prompt": "for i in range(",
        "max_tokens": 32,
        "temperature": 0,
        "return_spec_tokens_details": True,
    }
    details = client.post("/v1/completions", body).raise_for_status().json()["sglext"]["spec_tokens_details"]
    caps = details["spec_cap_lens_histogram"]
    assert details["spec_num_proposed_drafts"] == sum((rows - 1) * steps for rows, steps in enumerate(caps) if rows)
    rates = re.findall(r"^sglang:spec_(accept_length|accept_rate|cap_length)\{(.*)\} (\S+)$", metrics(client), re.M)
    by_replica: dict[str, dict[str, float]] = {}
    for name, labels, value in rates:
        by_replica.setdefault(labels, {})[name] = float(value)
    for seen in by_replica.values():
        rows, accepted = seen["cap_length"] - 1, seen["accept_length"] - 1
        assert seen["accept_rate"] == pytest.approx(accepted / rows if rows > 0 else 0.0, abs=1e-6)


def metrics(client: Client) -> str:
    return client.get_text("/metrics")


@pytest.fixture
def prometheus(client: Client, tmp_path: Path) -> Iterator[str]:
    """URL of a Prometheus with our configuration. It scrapes every 2 seconds: a reading takes half a core-second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian's package has it)")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (job,) = [one for one in config["scrape_configs"] if one["job_name"] == "sglang"]
    job["static_configs"] = [{"targets": [client.url.removeprefix("http://")]}]
    config["scrape_configs"] = [job]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = Server([], tmp_path / "unused.log").port  # a free one
    words = [binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 30
            while not _ready(f"http://127.0.0.1:{port}"):
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def expressions() -> Iterator[str]:
    """All of the dashboard and of the rules; of an alarm, each side of its comparisons, because it fires seldom."""
    for panel in panels("20s"):
        yield from (expression for expression, _ in panel.lines)
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        yield from re.split(r" [<>] [\d.]+(?: and )?", rule["expr"]) if "alert" in rule else [rule["expr"]]


@on_arms("replicas")
def test_expressions_have_series(client: Client, baseline: Baseline, prometheus: str) -> None:
    """Fails where an expression of the dashboard or of a rule has no series, or no number, on a server under load: a
    name, a label or a join is wrong."""
    asked = [expression for expression in expressions() if expression]
    deadline = time.monotonic() + 60
    while True:
        # SGLang hands out an answer that is not streamed every 50 tokens, and then counts the time between tokens.
        client.generate_all(baseline.prompts, 8, max_new_tokens=64, ignore_eos=True)
        empty = [one for one in asked if not _numbers(ask(prometheus, "query", query=one))]
        if not empty:
            break
        assert time.monotonic() < deadline, (_target(prometheus), empty)
    assert _target(prometheus) == ("up", "")
    assert {rule["state"] for rule in _alarms(prometheus)} <= {"inactive", "pending"}
    assert all(rule["health"] == "ok" for rule in _alarms(prometheus))


def _target(url: str) -> tuple[str, str]:
    """Health of the server as Prometheus sees it, and the error of its last scrape."""
    (target,) = httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]
    return target["health"], target["lastError"]


def _numbers(series: Sequence[dict]) -> bool:
    return any(not math.isnan(float(one["value"][1])) for one in series)


def _alarms(url: str) -> list[dict]:
    groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]
