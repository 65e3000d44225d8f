"""Small tokenizers made on the spot: byte-level like GPT-2's, and with byte fallback like Llama's."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cluster import text

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CORPUS = "the quick brown fox jumps over the lazy dog. hello world, 中文 emoji 🙂 "
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """315 tokens; each byte is one of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS * 50], trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words begin with a visible space; characters it does not know are spelled in bytes."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for value in range(256):
        vocab[f"<0x{value:02X}>"] = len(vocab)
    for piece in ("▁", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", ",", "."):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def save(directory: Path) -> Path:
    """The byte-level tokenizer as a model directory has it, with a chat template."""
    byte_level().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def tiny() -> text.Tokenizer:
    """The byte-level tokenizer without a chat template."""
    return text.Tokenizer(byte_level())
