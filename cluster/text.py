"""Text to token ids and back: chat templates, incremental detokenization, stop strings.

Knows nothing about requests, streams or wires. All text leaves here as complete characters, and
what is released after a token depends only on the tokens up to it, so that a resumed stream which
replays its tokens continues at exactly the character where it stopped.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
from numpy.typing import NDArray

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) a character
MAX_HELD_TOKENS = 8  # a character spans at most 4 tokens of one byte; more held tokens are garbage
LONG_TEXT = 4096  # characters; encoding more than this would stall other streams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """A Hugging Face tokenizer, read from a model's directory."""

    def __init__(self, backend: tokenizers.Tokenizer, template: "ChatTemplate | None" = None) -> None:
        self._backend = backend
        self._template = template
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.max_token_characters = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer adds: [n] int32."""
        return np.asarray(self._backend.encode(text).ids, np.int32)

    async def encode_aside(self, text: str) -> NDArray[np.int32]:
        """`encode`, in a thread when the text is long."""
        return self.encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(self.encode, text)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt of a conversation. Raises ValueError when the model has no template or it objects."""
        if self._template is None:
            raise ValueError("chat: this model has no chat template; send text or tokens")
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> NDArray[np.int32]:
        """Token ids of a conversation: [n] int32. Raises ValueError as `render_chat` does."""
        return self._encode_rendered(self.render_chat(messages))

    async def encode_chat_aside(self, messages: Sequence[ChatMessage]) -> NDArray[np.int32]:
        """Token ids of a conversation: [n] int32. The template itself writes every special token."""
        text = self.render_chat(messages)
        if len(text) < LONG_TEXT:
            return self._encode_rendered(text)
        return await asyncio.to_thread(self._encode_rendered, text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some tokens; ids that the tokenizer does not know decode to nothing."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _encode_rendered(self, text: str) -> NDArray[np.int32]:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: object) -> None:
        self._apply = tokenizer.apply_chat_template  # type: ignore[attr-defined]

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Raises ValueError with the template's own objection."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._apply(turns, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            raise ValueError(f"chat: the chat template refuses these messages: {error}") from error


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises ValueError when there is none that can be used."""
    from transformers import AutoTokenizer  # 2 s to import: only processes with text pay for it

    try:
        loaded = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {directory}: {str(error).splitlines()[0]}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"the tokenizer in {directory} has no tokenizers backend")
    return Tokenizer(backend, ChatTemplate(loaded) if loaded.chat_template else None)


class Detokenizer:
    """Turns a stream of tokens into text, one constant-size window at a time.

    The window is the tokens of the last release, which give the decoder its context (a leading
    space, a joined word), and the tokens held since because they end inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._context = [token_id for token_id in prompt_token_ids[-5:] if token_id not in self._skipped]
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._held_text(self._held)
        if text and not text.endswith(REPLACEMENT):
            return self._release(len(self._held), text)
        if len(self._held) > MAX_HELD_TOKENS:
            count = len(self._held) - 3  # an incomplete character is at most 3 bytes
            return self._release(count, self._held_text(self._held[:count]))
        return ""

    def flush(self) -> str:
        """What is still held, at the end of the stream: broken bytes become replacement characters."""
        return self._release(len(self._held), self._held_text(self._held)) if self._held else ""

    def _held_text(self, held: list[int]) -> str:
        decode, skip = self._tokenizer.decode, self._skip_special_tokens
        before = decode(self._context, skip_special_tokens=skip) if self._context else ""
        text = decode(self._context + held, skip_special_tokens=skip)
        while before.endswith(REPLACEMENT) and not text.startswith(before):
            before = before[:-1]  # a prompt may end inside a character, which then belongs to the output
        return text[len(before) :]

    def _release(self, count: int, text: str) -> str:
        self._context, self._held = self._held[:count], self._held[count:]
        return text


class StopStrings:
    """Finds the first stop string to end in a growing text, however it is cut into pieces.

    One Knuth-Morris-Pratt automaton per string: constant time per character, and its state is the
    number of characters that could still become that string.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._patterns = [(pattern, _failures(pattern)) for pattern in dict.fromkeys(stop)]
        self._states = [0] * len(self._patterns)

    @property
    def num_pending(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Where in `text` a stop string ends first (exclusive), and which one (the longest of equals)."""
        for position, character in enumerate(text):
            found = list(self._advance(character))
            if found:
                return position + 1, max(found, key=len)
        return None

    def _advance(self, character: str) -> Iterable[str]:
        for number, (pattern, failures) in enumerate(self._patterns):
            state = self._states[number]
            while state and pattern[state] != character:
                state = failures[state - 1]
            state += pattern[state] == character
            self._states[number] = state
            if state == len(pattern):
                self._states[number] = failures[-1]
                yield pattern


def _failures(pattern: str) -> list[int]:
    """[len(pattern)] length of the longest proper prefix that is a suffix of pattern[:i + 1]."""
    failures = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = failures[length - 1]
        length += pattern[position] == pattern[length]
        failures[position] = length
    return failures


class OutputText:
    """The text of one choice as its tokens arrive, up to a stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        hidden_token_ids: Iterable[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._has_stop = bool(stop)
        self._include_stop_str = include_stop_str
        self._num_tokens_left = min_tokens  # stop strings count from text after these
        self._hidden = frozenset(hidden_token_ids)  # end the output and are no part of its text
        self._pending = ""  # may become a stop string
        self._released: list[str] = []
        self.stop_string: str | None = None

    def push(self, token_id: int) -> bool:
        """Takes one more token; True when a stop string ends in it, after which nothing may follow."""
        assert self.stop_string is None
        watched = self._num_tokens_left <= 0
        self._num_tokens_left -= 1
        if token_id in self._hidden:
            return False
        return self._take(self._detokenizer.push(token_id), watched=watched)

    def end(self) -> None:
        """No token follows: releases what was held back."""
        if self.stop_string is None and not self._take(self._detokenizer.flush(), watched=True):
            self._released.append(self._pending)
            self._pending = ""

    def release(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _take(self, text: str, *, watched: bool) -> bool:
        if not text:
            return False
        found = self._stop.find(text) if self._has_stop and watched else None
        text, num_before = self._pending + text, len(self._pending)
        if found is None:
            end = len(text) - self._stop.num_pending
            self._released.append(text[:end])
            self._pending = text[end:]
            return False
        end, self.stop_string = num_before + found[0], found[1]
        self._released.append(text[: end if self._include_stop_str else end - len(self.stop_string)])
        self._pending = ""
        return True
