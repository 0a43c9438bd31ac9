"""Tiny random models of each family and their GGUF files, with the gguf package's keys and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"

CONTROL = ["<|unknown|>", "<|start|>", "<|end|>"]
MERGES = ["1 2", "12 3", "Ġ +", "Ġ 1", "a b", "Ċ Ċ", "ab c", "' s"]
MERGED = [merge.replace(" ", "") for merge in MERGES]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), *MERGED, "<tool>", "[unused]"]
TYPES = [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL) - 2) + [4, 5]
VOCABULARY = {token: i for i, (token, kind) in enumerate(zip(TOKENS, TYPES, strict=True)) if kind == 1}


def tiny_config(family: str, *, tied: bool = False, **options: Any) -> PreTrainedConfig:
    """Return two layers of width 64; in families that allow it, heads are wider than hidden / heads."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": len(TOKENS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    if family.startswith("qwen3"):
        sizes["head_dim"] = 32
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return CONFIGS[family](**sizes | options)


@dataclass(frozen=True)
class TinyModel:
    """A model that transformers has saved."""

    folder: Path
    config: PreTrainedConfig

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Tensors of its file, one an expert."""
        return load_file(self.folder / "model.safetensors")

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits(self.folder, tokens)


def save_tiny_model(folder: Path, config: PreTrainedConfig) -> TinyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Norms and biases change too, because values of 1 or 0 everywhere would hide a mistake.
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return TinyModel(folder, config)


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 logits of the model in a Hugging Face folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        result: torch.Tensor = model(tokens).logits
    return result


class GGUFFile:
    """A GGUF file in the making; tests may change `metadata` and `tensors` before `write`."""

    def __init__(self, model: TinyModel, splitting: str = "smollm") -> None:
        self.family = model.config.model_type
        self.architecture: str = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[self.family]]
        self.metadata = self._sizes(model.config) | tokenizer_metadata(splitting)
        self.tensors = {name: tensor.float().numpy() for name, tensor in self._tensors(model)}
        self.quantization: Mapping[str, gguf.GGMLQuantizationType] = {}

    def write(self, file: Path) -> Path:
        writer = gguf.GGUFWriter(file, self.architecture)
        for key, value in self.metadata.items():
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            if kind == gguf.GGUFValueType.ARRAY:
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, kind)
        for name, array in self.tensors.items():
            quantization = self.quantization.get(name, gguf.GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def key(self, template: str) -> str:
        """Return the key of this architecture, from one of gguf's templates or a name without prefix."""
        return template.format(arch=self.architecture) if "{" in template else f"{self.architecture}.{template}"

    def _sizes(self, config: PreTrainedConfig) -> dict[str, Any]:
        keys = gguf.Keys
        sizes = {
            keys.LLM.CONTEXT_LENGTH: config.max_position_embeddings,
            keys.LLM.BLOCK_COUNT: config.num_hidden_layers,
            keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
            keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
            keys.Attention.HEAD_COUNT: config.num_attention_heads,
            keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
            keys.Attention.LAYERNORM_RMS_EPS: config.rms_norm_eps,
            keys.Rope.FREQ_BASE: config.rope_parameters["rope_theta"],
        }
        if self.family.startswith("qwen3"):
            sizes |= {keys.Attention.KEY_LENGTH: config.head_dim, keys.Attention.VALUE_LENGTH: config.head_dim}
        if self.family == "qwen3_moe":
            sizes |= {
                keys.LLM.EXPERT_COUNT: config.num_experts,
                keys.LLM.EXPERT_USED_COUNT: config.num_experts_per_tok,
                keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
            }
        return {self.key(template): value for template, value in sizes.items()}

    def _tensors(self, model: TinyModel) -> Iterable[tuple[str, torch.Tensor]]:
        names = gguf.get_tensor_name_map(ARCHITECTURES[self.family], model.config.num_hidden_layers)
        experts: dict[str, list[torch.Tensor]] = {}
        for hf_name, tensor in sorted(model.weights.items(), key=lambda item: _natural(item[0])):
            if match := re.fullmatch(r"(.*\.experts)\.\d+(\..*)", hf_name):
                experts.setdefault("".join(match.groups()), []).append(tensor)
                continue
            if self.family == "llama" and (match := re.search(r"self_attn\.([qk])_proj", hf_name)):
                n_heads = model.config.num_attention_heads if match[1] == "q" else model.config.num_key_value_heads
                tensor = _neighbouring_pairs(tensor, n_heads)
            yield names.get_name(hf_name, try_suffixes=(".weight", ".bias")), tensor
        for hf_name, tensors in experts.items():
            yield names.get_name(hf_name, try_suffixes=(".weight",)), torch.stack(tensors)


def tokenizer_metadata(splitting: str) -> dict[str, Any]:
    """Return a file's keys for a tokenizer of bytes and a few merges."""
    keys = gguf.Keys.Tokenizer
    return {
        keys.MODEL: "gpt2",
        keys.PRE: splitting,
        keys.LIST: TOKENS,
        keys.TOKEN_TYPE: TYPES,
        keys.MERGES: MERGES,
        keys.BOS_ID: 1,
        keys.EOS_ID: 2,
        keys.PAD_ID: 2,
        keys.UNK_ID: 0,
        keys.ADD_BOS: False,
        keys.CHAT_TEMPLATE: CHAT_TEMPLATE,
    }


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _neighbouring_pairs(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Return the rows of each head reordered: row r goes to 2 r in the first half, to 2 r - width + 1 in the second."""
    rows = np.arange(weight.shape[0]).reshape(n_heads, -1)
    width = rows.shape[1]
    order = np.empty_like(rows)
    order[:, 0::2] = rows[:, : width // 2]
    order[:, 1::2] = rows[:, width // 2 :]
    return weight[torch.from_numpy(order.reshape(-1))]
