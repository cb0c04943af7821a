"""Opens a checkpoint by its folder or hub name: config, tokenizer and tensor shapes, without weights and SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.core import draft_weights
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.draft_formats import read_published
from sglang_dflash.serving.errors import first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALL_FILES = ("*.json", "*.jinja", "README.md", "mask_embedding.pt")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    Fields:
        name: as the user gave it.
        folder: where its small files lie.
        here: whether `name` is a folder of this machine; then its weights lie there, too.
        config: of `config.json`.
    """

    name: str
    folder: Path
    here: bool
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of the language model, also of a target that reads images."""
        return {**self.config, **(self.config.get("text_config") or {})}

    @property
    def rope_theta(self) -> float | None:
        """In either of transformers' spellings; None if there is none, or one for each kind of layer."""
        nested = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        found = nested.get("rope_theta", self.text.get("rope_theta")) if isinstance(nested, Mapping) else None
        return float(found) if isinstance(found, int | float) else None

    def json(self, name: str) -> Json:
        """A JSON file beside the config; {} if it is missing or damaged."""
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def shapes(self) -> dict[str, draft_weights.Shape] | None:
        """Those of `read_shapes`; of a hub name the headers alone are fetched.

        Raises:
            ValueError: one sentence on what is wrong with the files.
        """
        if self.here or any(self.folder.glob("*.safetensors")):
            return draft_weights.read_shapes(self.folder)
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError

        try:
            files = get_safetensors_metadata(self.name).files_metadata.values()
        except NotASafetensorsRepoError:
            return None
        except Exception as error:  # of httpx, of the hub or of a damaged header: nothing of it is the user's fault
            raise ValueError(f"the headers of {self.name} cannot be fetched: {first_line(error)}") from None
        return {name: tuple(one.shape) for file in files for name, one in file.tensors.items()}

    def tokenizer(self) -> Tokenizer | None:
        """None if there is no `tokenizer.json`, or it cannot be read."""
        from tokenizers import Tokenizer

        path = self.folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path)) if path.is_file() else None
        except Exception:  # of Rust, without a class of its own
            return None

    def chat_template(self) -> str | None:
        """The text of the default chat template; None if there is none."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        said = self.json("tokenizer_config.json").get("chat_template") or self.json("chat_template.json").get(
            "chat_template"
        )
        if isinstance(said, list):  # several templates by name
            said = next((one.get("template") for one in said if one.get("name") == "default"), None)
        return said


def open_checkpoint(name: str, flag: str) -> Checkpoint:
    """
    Args:
        name: a folder, or a name of the hub, whose small files are fetched into its cache.
        flag: the flag that names it, for errors.

    Raises:
        ValueError: there is no such folder or name, or its config is missing or damaged.
    """
    path = Path(name).expanduser()
    here = path.is_dir()
    folder = path if here else _fetched(name, flag)
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{flag} {name} has no config.json.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} {name}: its config.json is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{flag} {name}: its config.json must be a JSON object.")
    return Checkpoint(name, folder, here, config)


def read_draft(draft: Checkpoint) -> tuple[Checkpoint, DraftConfig]:
    """The draft with z-lab's plain keys, which is what all of doctor judges, and what its config says.

    Raises:
        ValueError: one sentence with the key, its value and what is allowed.
    """
    return replace(draft, config=read_published(draft.config).config), DraftConfig.from_dict(draft.config)


def _fetched(name: str, flag: str) -> Path:
    from huggingface_hub import snapshot_download

    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"{flag} {name} is not a folder.")
    try:
        return Path(snapshot_download(name, allow_patterns=list(SMALL_FILES)))
    except Exception as error:  # of httpx, of the hub, or OSError without a network
        raise ValueError(f"{flag} {name} is no folder and cannot be fetched: {first_line(error)}") from None
