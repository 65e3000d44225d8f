"""What the benchmark asks: prompts of a file, or of a built-in set.

`chat` asks open questions, where prompt lookup finds little to copy; `copy` asks for a passage word for word;
`code-edit` for a function with one name changed. Every prompt of a set is another one, and a seed gives the same again.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError

SETS = ("chat", "copy", "code-edit")

TOPICS = (
    "the sea", "a small garden", "old bridges", "learning the piano", "bread", "the moon", "a long train journey",
    "bicycles", "rain", "keeping bees", "a city at night", "mountains", "letters", "a clockmaker", "forests", "tea",
    "lighthouses", "the first snow", "maps", "a market", "rivers", "kites", "libraries", "winter", "stars",
)  # fmt: skip
QUESTIONS = (
    "Write a short story about {}.",
    "Explain to a child what is interesting about {}.",
    "Give me five facts about {}, one sentence each.",
    "Write a friendly letter to a neighbour about {}.",
    "What should a beginner know about {}?",
    "Describe {} in three paragraphs.",
)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
PLACES = ("harbour", "station", "village", "library", "market", "mill", "bakery", "school", "bridge", "tower")
THINGS = ("lantern", "ledger", "basket", "violin", "compass", "kettle", "ladder", "notebook", "umbrella", "clock")
WEATHER = ("it rained", "the wind turned", "the sun came out", "fog lay on the fields", "it was very cold")
VARIABLES = ("total", "count", "result", "value", "index", "length", "score", "limit", "width", "offset")
PLAIN_IDS = range(32, 56)  # bytes or letters of every vocabulary: ids below are often special


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's question: a chat turn, or token ids as they are."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None


def prompts_of(source: str, num_prompts: int, seed: int) -> list[Prompt]:
    """Prompts of a built-in set or of a file: lines of text, or of JSON with `prompt`. ConfigError says what is off."""
    if source in SETS:
        rng = random.Random(f"{source} {seed}")
        make = {"chat": _chat, "copy": _copy, "code-edit": _code_edit}[source]
        return [Prompt(text=make(rng)) for _ in range(num_prompts)]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"--dataset {source} is neither a file nor one of {', '.join(SETS)}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset {source} is empty")
    return [Prompt(text=_line(lines[index % len(lines)], source)) for index in range(num_prompts)]


def random_prompts(num_prompts: int, length: int, seed: int) -> list[Prompt]:
    """Token ids without meaning, each prompt of the same length: for a load of exact lengths."""
    rng = random.Random(seed)
    return [Prompt(token_ids=tuple(rng.choice(PLAIN_IDS) for _ in range(length))) for _ in range(num_prompts)]


def _line(line: str, source: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--dataset {source}: a line of JSON needs a `prompt`: {line[:60]}") from error
    return str(prompt)


def _chat(rng: random.Random) -> str:
    return rng.choice(QUESTIONS).format(rng.choice(TOPICS)) + f" Mention {rng.choice(NAMES)} once."


def _passage(rng: random.Random, num_sentences: int = 6) -> str:
    def sentence() -> str:
        who, where, what = rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS)
        return f"When {rng.choice(WEATHER)}, {who} left the {what} at the {where} and walked home."

    return " ".join(sentence() for _ in range(num_sentences))


def _copy(rng: random.Random) -> str:
    return f"{_passage(rng)}\n\nRepeat this text word for word."


def _code_edit(rng: random.Random) -> str:
    first, second, third = _different(rng, VARIABLES, 3)
    code = (
        f"def summarize(rows, {first}=0):\n"
        f"    {second} = 0\n"
        f"    for row in rows:\n"
        f"        if row.{first} > {first}:\n"
        f"            {second} += row.{first} * {rng.randrange(2, 9)}\n"
        f"        else:\n"
        f"            {second} -= {rng.randrange(2, 9)}\n"
        f"    return {second}, {first}\n"
    )
    return f"```python\n{code}```\n\nRename `{second}` to `{third}` in this function and print the whole function."


def _different(rng: random.Random, names: Sequence[str], count: int) -> list[str]:
    return rng.sample(list(names), count)
