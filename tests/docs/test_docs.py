"""README and docs: links lead somewhere, commands parse, and what they name exists."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from sglang.srt.server_args import ServerArgs
from test_modules import HEADING as EVERY_MODULE

from sglang_dflash.cli.benchmark import app as benchmark
from sglang_dflash.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
VARIABLE = re.compile(r"SGLANG_DFLASH_[A-Z_]*[A-Z]")
README_LINES = 110
MOST_LINES = {
    "serving.md": 200,
    "metrics.md": 85,
    "deploy.md": 90,
    "compatibility.md": 200,
    "kv.md": 110,
    "environment.md": 42,
    "troubleshooting.md": 210,
    "request-fields.md": 72,
    "check.md": 113,
    "doctor.md": 90,
    "generate.md": 130,
    "training.md": 230,
    "prompt-files.md": 28,
    "gpu.md": 160,
    "architecture.md": 300,
    "CONTRIBUTING.md": 180,
    "benchmarking.md": 130,
    "benchmarks/README.md": 130,
    "benchmarks/cpu-step.md": 150,
}
LINE_LENGTH = 120


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=name_of)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def without_code(text: str) -> str:
    """Fenced blocks out: brackets in them are no links, and `#` there begins no heading."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve(page: Path) -> None:
    """Fails where a relative link names a file that is not there, or a heading that its page lacks."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links {link}; there are {anchors(target)}"


def test_every_page_is_linked() -> None:
    """Fails where a reader cannot get from the README to a page."""
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        waiting += [target for link in links if (target := (page.parent / link).resolve()).is_file()]
    assert not set(PAGES) - seen


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line of the page's shell blocks in words, without variables before it."""
    blocks = re.findall(r"^( *)```bash\n(.*?)^\1```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for _, block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a document in a shell block
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


def _parse_typer(command: typer.Typer, words: list[str]) -> None:
    parser: Any = typer.main.get_command(command)
    if hasattr(parser, "commands"):
        parser, words = parser.commands[words[0]], words[1:]
    with parser.make_context("command", list(words)):
        pass


@cache
def _server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def parse(words: list[str]) -> bool:
    """Parses one of our commands with its own parser; False where the words are another program's."""
    if words[0] == "sglang-dflash":
        _parse_typer(app, words[1:])
    elif words[:2] == ["python", "benchmark_sglang.py"]:
        _parse_typer(benchmark, words[2:])
    elif words[:3] == ["python", "-m", "sglang.launch_server"]:
        _server_parser().parse_args(words[3:])
    elif words[:2] == ["python", "-m"] and words[2].startswith(("sglang_dflash.", "sglang_cpu.")):
        assert find_spec(words[2]) is not None, words[2]
    else:
        return False
    return True


def test_commands_parse(page: Path) -> None:
    """Fails where a command names a flag that does not exist, or a value that its flag does not take."""
    for words in commands(page):
        if words[-1:] == ["--help"]:
            continue
        try:
            parse(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{name_of(page)}: {shlex.join(words)}: {error!r}")


def test_commands_are_found() -> None:
    """Fails where the test above looks at no command, and so tests nothing."""
    found = [words for page in PAGES for words in commands(page)]
    least = {"sglang-dflash": 3, "python benchmark_sglang.py": 2, "python -m sglang.launch_server": 3}
    for start, count in least.items():
        assert sum(shlex.join(words).startswith(start) for words in found) >= count, start
    with pytest.raises((Exception, SystemExit)):
        parse(["sglang-dflash", "check", "--no-such-flag"])
    with pytest.raises((Exception, SystemExit)):
        parse(["python", "-m", "sglang.launch_server", "--model-path", "m", "--no-such-flag"])


@cache
def variables_of_the_code() -> frozenset[str]:
    sources = [
        *(path for folder in ("python", "scripts", "tools", "tests") for path in ROOT.glob(f"{folder}/**/*")),
    ]
    texts = [
        path.read_text() for path in sources if path.suffix in (".py", ".sh", ".cpp", ".h") and path != Path(__file__)
    ]
    return frozenset(name for text in texts for name in VARIABLE.findall(text))


def test_variables_exist(page: Path) -> None:
    """Fails where a page names an environment variable that nothing reads."""
    assert not set(VARIABLE.findall(page.read_text())) - variables_of_the_code()


def test_variables_are_documented() -> None:
    """Fails where the code reads a variable that environment.md does not explain."""
    assert not variables_of_the_code() - set(VARIABLE.findall((ROOT / "docs/environment.md").read_text()))


def test_readme_is_a_front_door() -> None:
    """Fails where it grows into a manual again."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_stay_short(name: str) -> None:
    """Fails where a page that must be read in one sitting grows."""
    written = (ROOT / "docs" / name).read_text().partition(EVERY_MODULE)[0]
    assert len(written.splitlines()) <= MOST_LINES[name]


def test_lines_are_short(page: Path) -> None:
    """Fails where a line of prose does not fit a screen; tables, links and code may be longer."""
    if page.parents[1] == ROOT / "docs" / "gpu":
        return
    for line in without_code(page.read_text()).splitlines():
        assert len(line) <= LINE_LENGTH or line.lstrip().startswith(("|", "![")), f"{name_of(page)}: {line}"


def test_nothing_is_left_to_be_written(page: Path) -> None:
    """Fails where a marker of a draft stayed."""
    assert not re.search(r"<!--|TODO|FIXME|XXX", page.read_text())
