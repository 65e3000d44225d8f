"""A GGUF file of the Llama architecture as a Hugging Face directory: config, bf16 weights, tokenizer.

Weights are dequantized and the rows of q and k put back in Hugging Face's order (GGUF interleaves the two
halves that RoPE turns). Only what such a file needs: byte-level BPE, plain RoPE, a tied or separate head.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Progress = Callable[[int, int], None]  # done and total in bytes

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PRE_TOKENIZERS = ("smollm", "gpt-2", "default")
CONTROL = 3  # token type of special tokens


def convert(gguf: Path, directory: Path, progress: Progress = lambda done, total: None) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    ValueError names the file and what in it is damaged or not supported.
    """
    try:
        reader = GGUFReader(gguf)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{gguf}: is no GGUF file or damaged: {error}") from error
    settings = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _config(settings, {tensor.name for tensor in reader.tensors})
        weights = _weights(reader, config, progress)
        tokenizer, tokenizer_config = _tokenizer(settings)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{gguf}: {error}") from error
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ids),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(settings: Mapping[str, object], tensors: set[str]) -> dict[str, object]:
    architecture = settings.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"architecture {architecture!r} is not supported, only 'llama'")
    for name in settings:
        if name.startswith("llama.rope.scaling"):
            raise ValueError(f"{name} is not supported")

    def number(name: str) -> int:
        return int(str(settings[f"llama.{name}"]))

    def real(name: str) -> float:
        # The shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(str(settings[f"llama.{name}"]))))

    tokens = settings["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon"),
        "rope_theta": real("rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": settings["tokenizer.ggml.bos_token_id"],
        "eos_token_id": settings["tokenizer.ggml.eos_token_id"],
        "pad_token_id": settings.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _weights(reader: GGUFReader, config: Mapping[str, object], progress: Progress) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    for tensor in reader.tensors:
        name, kind = _name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = _unpermuted(values, int(str(heads[kind])))
        weights[name] = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
        done += int(tensor.n_bytes)
        progress(done, total)
    return weights


def _name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a tensor, and its kind within a layer."""
    if name in TENSORS:
        return TENSORS[name], ""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise ValueError(f"tensor {name} is unknown")
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight", match[2]


def _unpermuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(settings: Mapping[str, object]) -> tuple[Tokenizer, dict[str, object]]:
    """Byte-level BPE and its tokenizer_config.json, chat template included."""
    kind, pre = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer {kind}/{pre} is not supported; supported: gpt2/{', gpt2/'.join(PRE_TOKENIZERS)}")
    tokens, merges, types = (settings[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    assert isinstance(types, list)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": settings["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = settings.get(f"tokenizer.ggml.{field}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[int(str(index))]
    if "tokenizer.chat_template" in settings:
        config["chat_template"] = settings["tokenizer.chat_template"]
    return tokenizer, config
