"""Stands in for `sglang.benchmark.serving`, whose imports take seconds: the same flags, rows, bar and result."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

FLAGS = ("backend", "base-url", "dataset-name", "dataset-path", "model", "tokenizer", "served-model-name", "seed")
FLAGS += ("ready-check-timeout-sec", "warmup-requests", "num-prompts", "output-file", "max-concurrency", "request-rate")
SWITCHES = ("flush-cache", "output-details", "disable-ignore-eos")


def ask(url: str, row: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps({**row, "stream": True}).encode())
    times, text, tokens, begin = [], "", 0, time.perf_counter()
    error = ""
    try:
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    times.append(time.perf_counter() - begin)
                    text = event["text"] if "meta_info" in event else text + event["choices"][0]["text"]
                    tokens = event.get("meta_info", {"completion_tokens": 256})["completion_tokens"]
    except (OSError, urllib.error.HTTPError) as failure:
        error = f"Traceback\n{failure}"
    gaps = [end - start for start, end in pairwise(times)]
    first = times[0] if times else 0.0
    return {"ttfts": first, "itls": gaps, "output_lens": tokens, "generated_texts": text, "errors": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}")
    for flag in SWITCHES:
        parser.add_argument(f"--{flag}", action="store_true")
    given = parser.parse_args()
    if "FAKE_CLIENT_FAILS" in os.environ:
        raise ValueError("this client does not want to work")
    rows = [json.loads(line) for line in Path(given.dataset_path).read_text().splitlines()]
    assert (
        given.dataset_name == "openai" and len(rows) == int(given.num_prompts) and all(row["messages"] for row in rows)
    )
    if given.flush_cache:
        urllib.request.urlopen(urllib.request.Request(f"{given.base_url}/flush_cache", b"{}"))
    begin, found = time.perf_counter(), []
    url = given.base_url + ("/generate" if given.backend == "sglang" else "/v1/completions")
    with ThreadPoolExecutor(int(given.max_concurrency or len(rows))) as pool:
        for one in pool.map(lambda row: ask(url, row), rows):
            found.append(one)
            print(f"\r 10%|# | {len(found)}/{len(rows)} [00:00]", end="", file=sys.stderr, flush=True)
    result = {name: [one[name] for one in found] for name in found[0]}
    Path(given.output_file).write_text(json.dumps({"duration": time.perf_counter() - begin, **result}) + "\n")


if __name__ == "__main__":
    main()
