"""A tiny random Llama as a Hugging Face directory: what the Ray tests and their processes load."""

import json
from pathlib import Path

from safetensors.torch import save_file

from worker.architecture import ModelConfig, read_config
from worker.weights import random_weights

VOCAB_SIZE = 320  # room for the tiny tokenizer
MAX_LEN = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_model(directory: Path, *, seed: int = 0) -> ModelConfig:
    """Writes config.json and model.safetensors; no tokenizer: token ids in, token ids out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = read_config(directory)
    save_file(random_weights(config, seed=seed), directory / "model.safetensors", metadata={"format": "pt"})
    return config
