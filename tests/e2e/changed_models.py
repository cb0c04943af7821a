"""Makes variants of the embedded pair: other weights, sliding windows, LoRA adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.reference import DFlashConfig, DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.training import TrainOptions
from sglang_dflash.training.layout import save_draft, with_dflash2_head

ADAPTERS = ("first", "second")
WINDOW = 24
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


def sliding_draft(folder: Path) -> Path:
    """A draft like those of Qwen3.6: its first layer has a sliding window and is causal in the block, its second has
    neither, and YaRN stretches its positions."""
    shutil.copytree(TINY_DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=WINDOW)
    config.update(rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": config["rope_theta"]})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dressed_draft(folder: Path, scale: float = 2.0) -> Path:
    """The embedded draft with the features of other drafts, MiMo's among them.

    Norms as in Gemma and scaled values leave the function as it is, in other weights. Attention sinks and a mask
    embedding for each position change it, so little that most drafts stay right.
    """
    shutil.copytree(TINY_DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    mask = config["dflash_config"]["mask_token_id"]
    config["use_gemma_norm"] = True
    config["dflash_config"] |= {"mask_token_id": 7, "attention_value_scale": scale, "attention_sink_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        wide = tensor.float()
        if name.endswith("norm.weight"):
            tensors[name] = wide - 1
        elif "v_proj" in name:
            tensors[name] = wide / scale
            sinks = 5 + 2 * torch.randn(config["num_attention_heads"], generator=generator)
            tensors[f"{name.partition('v_proj')[0]}attention_sink_bias"] = sinks
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    embedding = load_file(TINY_TARGET / "model.safetensors")["model.embed_tokens.weight"][mask].float()
    noise = torch.randn(config["block_size"], len(embedding), generator=generator)
    rows = embedding + 2 * embedding.std() * noise
    rows[0] = 1e3  # the anchor's, which nothing reads
    torch.save({"embedding": rows, "mask_token_id": 7, "per_position": True}, folder / "mask_embedding.pt")
    return folder


def in_fp8(source: Path, folder: Path) -> Path:
    """A copy of a model whose layers' projections are in FP8, with a scale for each 64 x 64 block."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "_proj.weight" not in name:
            continue
        blocks = tensor.float().unflatten(0, (-1, 64)).unflatten(-1, (-1, 64))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scales).view(tensor.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    config["quantization_config"]["activation_scheme"] = "dynamic"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def meant_by_fp8(source: Path, folder: Path) -> Path:
    """A copy of what `in_fp8` wrote, with the plain weights that it means."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight, scales = name.removesuffix("_scale_inv"), tensors.pop(name)
        blocks = tensors[weight].float().unflatten(0, (-1, 64)).unflatten(-1, (-1, 64))
        tensors[weight] = (blocks * scales[:, None, :, None]).flatten(2).flatten(0, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dflash2_draft(folder: Path, in_block: float = 0.01, in_selector: float = 1.0) -> Path:
    """The embedded draft with a DFlash2 head of random weights: three taps, groups of 8, a selector of rank 24 over 12
    candidates. The noise is so small that most drafts stay right, and so large that the head decides many of them."""
    plain = DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32)
    shape = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 24, "selector_top_k": 12}
    options = TrainOptions(target=str(TINY_TARGET), data=(__file__,), output=str(folder), head="dflash2", **shape)
    draft = with_dflash2_head(plain, plain.config.vocab_size, options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = in_block if "conv." in name else in_selector if "successor" in name else 0.0
            weight += noise * torch.randn(weight.shape, generator=generator)
    save_draft(draft, folder)
    return folder


def domino_draft(folder: Path, noise: float = 0.2) -> Path:
    """The embedded draft with a Domino projector of random weights: a GRU of 48 units, rank 16."""
    plain = DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32)
    config = DFlashConfig.from_dict(plain.config.to_dict())
    shape = {"gru_hidden_dim": 48, "emb_dim": 16, "pure_draft_prefix_len": 1, "shift_label": False}
    config.dflash_config = plain.config.dflash_config | {"projector_type": "domino"} | shape
    torch.manual_seed(5)
    draft = DFlashDraftModel(config)
    draft.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for weight in [*draft.prefix_gru.parameters(), *draft.embed_proj.parameters()]:
            weight.normal_(std=noise)
    save_draft(draft, folder)
    return folder


def with_other_weights(source: Path, folder: Path, names: tuple[str, ...]) -> Path:
    """A copy of a model with noise on the tensors whose names contain one of `names`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if any(part in name for part in names):
            noise = 1 + 0.3 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() * noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapters(folder: Path) -> Iterator[str]:
    """Random LoRA adapters for the target, as values of `--lora-paths`."""
    config = json.loads((TINY_TARGET / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    rank = 4
    for seed, adapter in enumerate(ADAPTERS):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for module, (rows, columns) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, columns, generator=generator)
                tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
        (folder / adapter).mkdir(parents=True)
        save_file(tensors, folder / adapter / "adapter_model.safetensors")
        modules = [module.rpartition(".")[2] for module in shapes]
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": modules, "bias": "none"}
        (folder / adapter / "adapter_config.json").write_text(json.dumps(settings))
        yield f"{adapter}={folder / adapter}"
