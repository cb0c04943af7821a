"""What `deploy/` starts: every command parses, and asks for nothing that is refused; versions and names agree."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs, prepare_server_args
from test_docs import commands

from sglang_dflash import __version__
from sglang_dflash.host.start.features import refuse_features
from sglang_dflash.host.start.version import SUPPORTED_SGLANG

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
MANIFESTS = [*sorted(DEPLOY.glob("*.yaml")), *sorted((DEPLOY / "kubernetes").glob("*.yaml"))]
LAUNCH, GATEWAY = ["-m", "sglang.launch_server"], ["smg", "launch"]
# What Kubernetes and LeaderWorkerSet put in the place of $(NAME), in the second pod of two.
POD = {"NAMESPACE": "models", "LWS_LEADER_ADDRESS": "leader.models", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
FIRST_START_S = 1800  # weights of some 100 GB from the hub at 1 Gbit/s take 15 minutes, compiling and graphs the rest


def loaded(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def containers(found: Any) -> Iterator[dict[str, Any]]:
    """Everything with an image: services of a compose file, containers of a manifest; templates (`x-`) left out."""
    if isinstance(found, dict):
        if "image" in found:
            yield found
        for key, value in found.items():
            if not str(key).startswith("x-"):
                yield from containers(value)
    elif isinstance(found, list):
        for value in found:
            yield from containers(value)


def words(container: dict[str, Any]) -> list[str]:
    """A container's command line."""
    command = container.get("command", [])
    whole = [*(shlex.split(command) if isinstance(command, str) else command), *container.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda name: POD[name[1]], word) for word in whole]


def commands_of(path: Path) -> list[list[str]]:
    if path.suffix == ".md":
        return list(commands(path))
    if path == DOCKERFILE:
        return [ast.literal_eval(line[4:]) for line in path.read_text().splitlines() if line.startswith("CMD ")]
    return [line for document in loaded(path) for container in containers(document) if (line := words(container))]


def every_command(start: list[str]) -> list[Any]:
    found = []
    for path in [*MANIFESTS, DOCKERFILE, ROOT / "docs/deploy.md"]:
        of_kind = [line for line in commands_of(path) if start in (line[:2], line[1:3])]
        found += [pytest.param(line, id=f"{path.name}-{number}") for number, line in enumerate(of_kind)]
    return found


def served(line: list[str]) -> Any:
    """The arguments of a command line; raises what SGLang's parser or our checks of features raise."""
    asked = prepare_server_args(line[3:])
    refuse_features({field.name: getattr(asked, field.name) for field in record_fields(ServerArgs)})
    return asked


@pytest.mark.parametrize("line", every_command(LAUNCH))
def test_servers_are_served(line: list[str]) -> None:
    """Fails where SGLang does not know a flag of a started server, or our worker refuses it."""
    if line[-1] == "--help":
        return
    asked = served(line)
    assert asked.speculative_algorithm == "DFLASH" and asked.speculative_draft_model_path


def test_a_wrong_command_is_seen() -> None:
    """Fails where the test above would accept an unknown flag or a refused feature, or looks at too few commands."""
    good = next(line for line in commands_of(DEPLOY / "compose.yaml") if line[1:3] == LAUNCH)
    with pytest.raises(SystemExit):
        served([*good, "--no-such-flag"])
    with pytest.raises(ValueError, match="--pp-size 2"):
        served([*good, "--pp-size", "2"])
    assert len(every_command(LAUNCH)) >= 6 and len(every_command(GATEWAY)) >= 3


@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="the gateway is not installed (pip install smg)")
@pytest.mark.parametrize("line", every_command(GATEWAY))
def test_gateways_parse(line: list[str]) -> None:
    """Fails where the gateway does not know a flag."""
    from smg.launch_router import parse_router_args

    if line[-1] != "--help":
        assert parse_router_args(line[2:]).policy == "cache_aware"


def test_images_are_of_this_release() -> None:
    """Fails where the image's SGLang is not the pinned one, or a manifest names another image than the Dockerfile's."""
    text = DOCKERFILE.read_text()
    assert re.findall(r"^FROM lmsysorg/sglang:v(\S+)", text, re.MULTILINE) == [SUPPORTED_SGLANG]
    built = set(re.findall(r"-t (\S+)", text))
    named = {one["image"] for path in MANIFESTS for document in loaded(path) for one in containers(document)}
    assert built == {f"sglang-dflash:{__version__}", f"sglang-dflash-gateway:{__version__}"}
    assert built <= named and all("dflash" not in image for image in named - built)


def test_starts_have_time() -> None:
    """Fails where a server is ended while it starts for the first time, or serves without /dev/shm of its own."""
    servers = [
        one
        for path in MANIFESTS
        for document in loaded(path)
        for one in containers(document)
        if words(one)[1:3] == LAUNCH
    ]
    assert len(servers) == 5
    for one in servers:
        if "healthcheck" in one:
            assert one["healthcheck"]["start_period"] == "60m" and one["shm_size"] == "16gb"
            continue
        assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]
        if probe := one["startupProbe"]:
            assert probe["periodSeconds"] * probe["failureThreshold"] >= FIRST_START_S
            assert probe["httpGet"]["path"] == "/health_generate"


def test_services_know_each_other() -> None:
    """Fails where gateway or Prometheus ask another name or port than a replica's, or Grafana gets another
    folder than the dashboard's."""
    (compose,) = loaded(DEPLOY / "compose.yaml")
    services = compose["services"]
    replicas = [f"{name}:30000" for name, one in services.items() if words(one)[1:3] == LAUNCH]
    line = words(services["gateway"])
    assert [word.removeprefix("http://") for word in line if word.startswith("http://")] == replicas
    (scraped,) = loaded(DEPLOY / "prometheus/prometheus.yml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped["scrape_configs"]}
    assert targets == {"sglang": replicas, "gateway": [f"gateway:{line[line.index('--prometheus-port') + 1]}"]}
    assert scraped["rule_files"] == ["rules.yml"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == "/dashboards/dflash.json" and "./grafana:/dashboards:ro" in services["grafana"]["volumes"]
    for content in compose["configs"].values():
        assert yaml.safe_load(content["content"])["apiVersion"] == 1
