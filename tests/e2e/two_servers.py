"""Two servers, one for prefill and one for decode, and the client that asks both as a router does."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from preloaded import PreloadedServer
from sglang_dflash.serving import Client, Server
from sglang_dflash.serving.server import stop_all

# SGLang's launcher sets the second for its children, but those of a `PreloadedServer` are forked before.
LOOPBACK = {"SGLANG_HOST_IP": "127.0.0.1", "MC_FORCE_TCP": "1"}


# A decode server takes a request only where so many tokens would still fit: by default few would run at once here. And
# its backups have a fifth of the device's room: what does not fit is aborted.
CROWDED = ["--num-reserved-decode-tokens", "16", "--hicache-ratio", "2"]


def need_mooncake() -> None:
    """Skips a test where KV cannot be transferred."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        pytest.skip(f"Mooncake is not there: pip install 'sglang-dflash[pd]', apt-get install libibverbs1 ({error})")


class PairClient(Client):
    """Sends each request to both servers; the answer is the decode server's."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int) -> None:
        super().__init__(decode.url)
        self.prefill = prefill.client()
        self._bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/generate":
            body = {**body, **self._bootstrap, "bootstrap_room": random.getrandbits(62)}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(self.prefill.post, path, body)
            answer = super().post(path, body)
            first = prefilled.result()
        return first if answer.status_code == 200 and first.status_code != 200 else answer


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Server
    decode: Server
    client: PairClient


@contextmanager
def running_pair(
    flags: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
) -> Iterator[Pair]:
    """Both servers with `flags`, and each with its own."""
    port = random.randrange(30000, 32000)
    ours = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "store"), **environment, **LOOPBACK}
    first = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port), *prefill]
    second = ["--disaggregation-mode", "decode", *CROWDED, *decode]
    servers = [PreloadedServer([*flags, *own], folder / f"{own[1]}.log", ours) for own in (first, second)]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait(timeout_s=420.0)
        yield Pair(*servers, PairClient(*servers, port))
    finally:
        stop_all(servers)
