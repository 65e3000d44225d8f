"""Incremental text equals whole text, never breaks a character, and stops at stop strings."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text import ChatMessage, Detokenizer, OutputText, StopStrings, Tokenizer, load_tokenizer
from tests import tiny_tokenizer

TINY = tiny_tokenizer.tiny()
FALLBACK = Tokenizer(tiny_tokenizer.byte_fallback())


def pushed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def output_text(stop: Sequence[str] = (), **options: object) -> OutputText:
    return OutputText(Detokenizer(TINY), stop=stop, **options)  # type: ignore[arg-type]


def run(text: OutputText, token_ids: Sequence[int]) -> tuple[str, int]:
    """The whole text and how many tokens were taken."""
    for count, token_id in enumerate(token_ids, start=1):
        if text.push(token_id):
            return text.release(), count
    text.end()
    return text.release(), len(token_ids)


@given(st.lists(st.sampled_from("the quick 中文🙂é\n.") | st.characters(codec="utf-8"), max_size=30))
@settings(deadline=None)
def test_pieces_of_any_text_join_to_the_text(characters: list[str]) -> None:
    text = "".join(characters)
    assert "".join(pushed(Detokenizer(TINY), TINY.encode(text).tolist())) == text


@pytest.mark.parametrize("text", ["hello world", "hello 中文 world", "🙂🙂🙂", "é", "中hello, 文."])
def test_byte_fallback_pieces_join_to_the_text(text: str) -> None:
    token_ids = FALLBACK.encode(text).tolist()
    pieces = pushed(Detokenizer(FALLBACK), token_ids)
    assert "".join(pieces) == text == FALLBACK.decode(token_ids)


def test_no_piece_ends_inside_a_character() -> None:
    for tokenizer in (TINY, FALLBACK):
        for piece in pushed(Detokenizer(tokenizer), tokenizer.encode("🙂 中文 ok").tolist()):
            assert "\ufffd" not in piece


def test_random_tokens_join_to_what_the_tokenizer_says() -> None:
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(3, 315) for _ in range(40)]
        assert "".join(pushed(Detokenizer(TINY), token_ids)) == TINY.decode(token_ids)


def test_broken_bytes_are_held_for_a_bounded_number_of_tokens() -> None:
    lead = next(i for i in range(3, 315) if TINY.decode([i]) == "\ufffd")
    detokenizer = Detokenizer(TINY)
    pieces = [detokenizer.push(lead) for _ in range(100)]
    assert sum(map(len, pieces)) > 80


def test_time_per_token_does_not_grow() -> None:
    lead = next(i for i in range(3, 315) if TINY.decode([i]) == "\ufffd")
    for token_ids in ([5] * 4000, [lead] * 4000, [0] * 4000, [9999] * 4000):
        detokenizer = Detokenizer(TINY)
        halves = []
        for half in (token_ids[:2000], token_ids[2000:]):
            start = time.perf_counter()
            for token_id in half:
                detokenizer.push(token_id)
            halves.append(time.perf_counter() - start)
        assert halves[1] < 5 * halves[0] + 0.01


def test_special_tokens_are_skipped_or_shown() -> None:
    token_ids = [*TINY.encode("hi").tolist(), tiny_tokenizer.EOS_TOKEN_ID]
    assert "".join(pushed(Detokenizer(TINY), token_ids)) == "hi"
    assert "".join(pushed(Detokenizer(TINY, skip_special_tokens=False), token_ids)) == "hi<|im_end|>"


def test_a_prompt_gives_context_and_may_end_inside_a_character() -> None:
    assert FALLBACK.decode(FALLBACK.encode(" world").tolist()[1:]) == "world"
    hello, world = FALLBACK.encode("hello").tolist(), FALLBACK.encode("world").tolist()
    assert "".join(pushed(Detokenizer(FALLBACK, prompt_token_ids=hello), world)) == " world"
    lead, *rest = FALLBACK.encode("中").tolist()[1:]
    assert "".join(pushed(Detokenizer(FALLBACK, prompt_token_ids=[*hello, lead]), rest)) == "中"


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=30), st.integers(1, 5))
def test_stop_strings_are_found_however_the_text_is_cut(stop: str, text: str, size: int) -> None:
    matcher, position = StopStrings([stop]), 0
    for start in range(0, len(text), size):
        found = matcher.find(text[start : start + size])
        if found is not None:
            assert start + found[0] == text.index(stop) + len(stop)
            return
        position = start + len(text[start : start + size])
        pending = text[position - matcher.num_pending : position]
        assert stop.startswith(pending)
    assert stop not in text


def test_trap_13_a_stop_string_inside_an_accepted_run_ends_text_and_ids_together() -> None:
    token_ids = TINY.encode("hello world. the lazy dog").tolist()
    text, count = run(output_text([". th"]), token_ids)
    assert text == "hello world"
    assert TINY.decode(token_ids[:count]).startswith("hello world. th")
    assert ". th" not in TINY.decode(token_ids[: count - 1])


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    text = output_text(["ENDING"])
    released = []
    for token_id in TINY.encode("the END of").tolist():
        assert not text.push(token_id)
        released.append(text.release())
    assert "".join(released) == "the END of"
    held = output_text(["ENDING"])
    for token_id in TINY.encode("the END").tolist():
        held.push(token_id)
    assert held.release() == "the "
    held.end()
    assert held.release() == "END"


def test_the_stop_string_stays_when_asked_for() -> None:
    token_ids = TINY.encode("one STOP two").tolist()
    assert run(output_text(["STOP"]), token_ids)[0] == "one "
    assert run(output_text(["STOP"], include_stop_str=True), token_ids)[0] == "one STOP"


def test_the_first_stop_string_to_end_wins_and_the_longest_of_those() -> None:
    text = output_text(["cd", "bcd", "abcde"])
    assert run(text, TINY.encode("xabcdef").tolist())[0] == "xa"
    assert text.stop_string == "bcd"


def test_stop_strings_wait_for_min_tokens() -> None:
    token_ids = TINY.encode("a.b.c").tolist()
    assert len(token_ids) == 5
    assert run(output_text(["."], min_tokens=2), token_ids) == ("a.b", 4)


def test_hidden_tokens_are_counted_and_not_shown() -> None:
    token_ids = TINY.encode("ab").tolist()
    assert run(output_text(hidden_token_ids=[token_ids[1]]), token_ids) == ("a", 2)


def test_what_is_released_depends_only_on_the_tokens_so_far() -> None:
    token_ids = TINY.encode("🙂 the END of 中文").tolist()

    def released(*parts: Sequence[int]) -> list[str]:
        text, pieces = output_text(["ENDING", "of x"]), []
        for part in parts:
            assert not any(text.push(token_id) for token_id in part)
            pieces.append(text.release())
        return pieces

    [whole] = released(token_ids)
    for cut in range(len(token_ids)):
        assert "".join(released(token_ids[:cut], token_ids[cut:])) == whole


def test_a_tokenizer_is_loaded_with_its_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer.save(tmp_path))
    rendered = tokenizer.render_chat([ChatMessage(role="user", content="hello")])
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="no robots"):
        tokenizer.render_chat([ChatMessage(role="robot", content="hello")])
    with pytest.raises(ValueError, match="no chat template"):
        TINY.render_chat([ChatMessage(role="user", content="hello")])


async def test_a_chat_prompt_has_each_special_token_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer.save(tmp_path))
    token_ids = (await tokenizer.encode_chat_aside([ChatMessage(role="user", content="hello")])).tolist()
    assert token_ids.count(1) == 2
    assert token_ids.count(2) == 1


def test_a_directory_without_a_tokenizer_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
