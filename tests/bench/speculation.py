"""Speculation beside none, drafter by drafter and K by K, at every load, with the in-process engine.

    python -m tests.bench.speculation [--json] [--plot FILE] [--head DIR] [--draft-model DIR] [--rounds N] ...

One model is loaded once and every setting drafts on it in turn, round after round: all settings of a round answer
the same prompts greedily and must give the same streams. Prints tokens per second (the median of the rounds and an
interval), measured beside theoretical speed-up, and what speculation costs the KV cache.
"""

import argparse
import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench_prompts import prompts_of
from cluster.config import AUTO_DRAFTS, ServeConfig, SpeculativeConfig
from cluster.engine import Engine, Message, in_order
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import Sizes, num_cpus, size
from cluster.text import ChatMessage, Tokenizer, load_tokenizer
from scheduler.core import Scheduler
from scheduler.events import StartStep, StepFinished
from scheduler.request import SamplingParams
from scheduler.step import StepPlan
from tests.bench.speculation_figures import AUTO, NONE, Costs, Decode, Load, Measured, Setting, summary
from tests.bench.speculation_page import COSTS, THEORY, page
from worker.actor import build
from worker.drafter import Drafter
from worker.drafting import DraftSpec, load_draft_weights, mixed_drafter, model_drafter
from worker.eagle3 import Eagle3Head
from worker.model import Model
from worker.process import environment, restart_with
from worker.runner import Runner

WORKLOADS = ("chat", "copy")
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
LOOKUP = "ngram"
KS = {LOOKUP: (1, 2, 3, 4, 8), "eagle3": (1, 2, 3, 4), "draft_model": (1, 2, 3, 4)}
MIXED_KS = (1, 2, 3, 4, 8)
WAVES = 2  # requests for each place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """What a drafter is made of."""

    spec: DraftSpec
    weights: Eagle3Head | Model | None
    with_lookup: bool


class Bench:
    """A model, loaded once, and a runner over it for each setting."""

    def __init__(self, sizes: Sizes, specs: Sequence[DraftSpec]) -> None:
        """specs: of the drafters with weights, the one that auto uses first."""
        bare = bare_runner(sizes)
        self.model, self._sizes, self._max_num_seqs = bare.model, sizes, bare.max_num_seqs
        self.tokenizer: Tokenizer = load_tokenizer(sizes.directory)
        self._sources = {LOOKUP: Source(spec=DraftSpec(), weights=None, with_lookup=True)}
        for draft in specs:
            weights = load_draft_weights(draft, self.model, sizes.directory)
            self._sources[draft.method] = Source(spec=draft, weights=weights, with_lookup=False)
            self._sources[f"{LOOKUP}+{draft.method}"] = Source(spec=draft, weights=weights, with_lookup=True)
        mixed = [f"{LOOKUP}+{draft.method}" for draft in specs]
        self._sources[AUTO] = self._sources[mixed[0] if mixed else LOOKUP]
        self._runners: dict[Setting, Runner] = {}

    @property
    def settings(self) -> list[Setting]:
        """Every one that can be made of what was loaded; none and auto are neighbours when taken in turn."""
        fixed = [Setting(name, k) for name in self._sources if name != AUTO for k in KS.get(name, MIXED_KS)]
        return [Setting(NONE), *fixed, Setting(AUTO)]

    def run(self, setting: Setting, load: Load, seed: int, max_tokens: int) -> Measured:
        """Answer prompts of this seed, so many at once as long as there are any; then the rest, unmeasured.

        Requests whose drafts do well end earlier: the last ones, alone, would say more of a batch's end than of speed.
        """
        runner = self._runner(setting)
        watch = Watch(load.concurrency)
        config = replace(self._sizes.scheduler, max_drafts=runner.max_drafts)
        engine = Engine([runner], config, schedule=watch)
        watch.scheduler = engine.scheduler
        asked = prompts_of(load.workload, WAVES * load.concurrency, seed)
        waiting = deque(self._encoded(prompt.text) for prompt in asked)
        sampling = SamplingParams(temperature=0.0, eos_token_ids=self.model.config.eos_token_ids)
        started_s = time.perf_counter()
        while waiting or num_running(engine) == load.concurrency:
            while waiting and num_running(engine) < load.concurrency:
                engine.submit(waiting.popleft(), sampling, max_tokens)
            engine.step()
        elapsed_s = time.perf_counter() - started_s
        num_tokens = sum(len(output.token_ids) for output in engine.outputs.values())
        outputs = engine.run()
        stats = engine.scheduler.stats()
        watch.costs.reserved, watch.costs.rolled_back = stats.tokens_reserved, stats.tokens_rolled_back
        watch.costs.stale = stats.stale_tokens_dropped
        return Measured(
            streams=[output.token_ids for output in outputs.values()],
            num_tokens=num_tokens,
            elapsed_s=elapsed_s,
            acceptance_length=stats.mean_acceptance_length,
            decode=watch.decode,
            costs=watch.costs,
        )

    def _encoded(self, text: str) -> list[int]:
        return [int(token_id) for token_id in self.tokenizer.encode_chat([ChatMessage(role="user", content=text)])]

    def _runner(self, setting: Setting) -> Runner:
        """Its drafter stays: what auto has learned of the machine it keeps, as in a server."""
        if setting not in self._runners:
            drafter = None if setting.drafter == NONE else self._drafter(setting)
            self._runners[setting] = Runner(
                worker_id="bench", model=self.model, drafter=drafter, max_num_seqs=self._max_num_seqs, sanitizer=None
            )
        return self._runners[setting]

    def _drafter(self, setting: Setting) -> Drafter:
        source = self._sources[setting.drafter]
        spec = replace(source.spec, max_drafts=setting.k or AUTO_DRAFTS, is_adaptive=setting.drafter == AUTO)
        if source.with_lookup or source.weights is None:
            return mixed_drafter(spec, self.model, source.weights, max_num_seqs=self._max_num_seqs, sanitize=False)
        return model_drafter(spec, self.model, source.weights, max_num_seqs=self._max_num_seqs, sanitize=False)


def num_running(engine: Engine) -> int:
    """Requests that have not ended."""
    return sum(output.finish is None for output in engine.outputs.values())


def bare_runner(sizes: Sizes) -> Runner:
    """The model, without anything that drafts."""
    [spec] = sizes.workers
    runner, _ = build(replace(spec, drafts=DraftSpec(max_drafts=0)))
    return runner


class Watch:
    """A `Schedule` in which nothing happens, that looks at every step."""

    def __init__(self, concurrency: int) -> None:
        self.decode, self.costs = Decode(), Costs()
        self.scheduler: Scheduler | None = None
        self._concurrency = concurrency
        self._plans: dict[int, StepPlan] = {}  # by step_seq

    def __call__(self, under_way: list[Message]) -> list[Message]:
        """Everything, in order."""
        arrived = in_order(under_way)
        for message in arrived:
            match message:
                case StartStep():
                    self._plans[message.plan.step_seq] = message.plan
                case StepFinished():
                    plan = self._plans.pop(message.result.step_seq)
                    self.decode.add(plan, message.result, self._concurrency)
        assert self.scheduler is not None
        for worker in self.scheduler.workers.values():
            self.costs.placeholders.append(int(worker.rows.num_placeholders[worker.rows.order()].sum()))
            self.costs.garbage.append(worker.rows.num_garbage_tokens())
        return arrived


def measure(
    bench: Bench, loads: Sequence[Load], settings: Sequence[Setting], *, num_rounds: int, max_tokens: int,
    display: Display,
) -> dict[Load, dict[Setting, list[Measured]]]:  # fmt: skip
    """Every setting once a round, each round on prompts of its own and beginning with another setting."""
    measured: dict[Load, dict[Setting, list[Measured]]] = {}
    weights = {load: 32 + load.concurrency for load in loads}  # about what a run takes
    total = num_rounds * len(settings) * sum(weights.values())
    done = 0.0
    with display.phase("Warming up"):
        for setting in settings:
            bench.run(setting, Load(loads[0].workload, 2), 0, min(max_tokens, 16))
    with display.bar("Measuring", total) as advance:
        for load in loads:
            runs = measured[load] = {setting: [] for setting in settings}
            with display.bar(f"{load.workload}, {load.concurrency} at once", num_rounds) as finished:
                for index in range(num_rounds):
                    first = index % len(settings)
                    for setting in (*settings[first:], *settings[:first]):
                        runs[setting].append(bench.run(setting, load, 1 + index, max_tokens))
                        done += weights[load]
                        advance(done)
                    check_same_streams(runs)
                    finished(index + 1)
    return measured


def check_same_streams(runs: dict[Setting, list[Measured]]) -> None:
    """The promise: the last round's streams are the same whatever drafted. AssertionError names who differs."""
    (first, reference), *others = [(setting, of[-1].streams) for setting, of in runs.items()]
    for setting, streams in others:
        assert streams == reference, f"{setting.name} and {first.name} gave different streams"


def draft_specs(config: ServeConfig, directory: Path, head: str | None, draft_model: str | None) -> list[DraftSpec]:
    """Of the drafters with weights: the head that is given or ships, and the draft model if one is given."""
    default = SpeculativeConfig() if head is None else SpeculativeConfig(method="eagle3", model=head)
    asked = [default]
    if draft_model is not None:
        asked.append(SpeculativeConfig(method="draft_model", model=draft_model))
    sizes = (size(replace(config, speculative=speculative), directory) for speculative in asked)
    specs = [one.workers[0].drafts for one in sizes]
    return [spec for spec in specs if spec.method != LOOKUP]


def chosen(settings: Sequence[Setting], names: str | None) -> list[Setting]:
    """Those named, by drafter or by `drafter:K`; all without names. ValueError for a name of none."""
    if names is None:
        return list(settings)
    wanted = names.split(",")
    known = {name for setting in settings for name in (setting.name, setting.drafter)}
    for name in wanted:
        if name not in known:
            raise ValueError(f"--settings: {name} is none of {', '.join(sorted(known))}")
    return [setting for setting in settings if {setting.name, setting.drafter} & set(wanted)]


def report(result: dict[str, Any]) -> None:
    """Three tables: speed, theory, costs."""
    console = Console()
    speed, theory, costs = (Table("load", "setting", title=title) for title in ("Speed", "Theory", "Costs, tokens"))
    for table, names in (
        (speed, ("tokens/s", "interval", "over none", "acceptance length")), (theory, THEORY), (costs, COSTS),
    ):  # fmt: skip
        for name in names:
            table.add_column(name, justify="right")
    for row in result["rows"]:
        key = (f"{row['workload']} x {row['concurrency']}", row["setting"])
        interval = f"{row['low']} - {row['high']}"
        speed.add_row(*key, str(row["tokens_per_s"]), interval, str(row["vs_none"]), str(row["acceptance_length"]))
        if row["theory"] is not None:
            theory.add_row(*key, *(str(row["theory"][name]) for name in THEORY))
        costs.add_row(*key, *(str(row["costs"][name]) for name in COSTS))
    for table in (speed, theory, costs):
        console.print(table)
    for load in result["loads"]:
        console.print(", ".join(f"{name} {value}" for name, value in load.items()), highlight=False)
    for name in ("auto_vs_none_min", "auto_vs_best_min"):
        console.print(f"{name} {result[name]}", highlight=False)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speculation beside none, at every load")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", default=None, help="an EAGLE-3 head; default: the one that ships for the model")
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--quantization", choices=("int8",), default=None)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)), help="numbers with commas")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names with commas")
    parser.add_argument("--settings", default=None, help="names with commas: none, auto, ngram, eagle3:4, ...")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path, default=None, help="an HTML file")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, measure, conclude."""
    loads = [
        Load(workload, int(concurrency))
        for workload in arguments.workload.split(",")
        for concurrency in arguments.concurrency.split(",")
    ]
    config = ServeConfig(
        model=arguments.model, port=0, threads=arguments.threads, quantization=arguments.quantization,
        max_num_seqs=max(load.concurrency for load in loads),
    )  # fmt: skip
    with Display() as display:
        directory = resolve_model(config.model, display)
        with display.phase("Loading"):
            specs = draft_specs(config, directory, arguments.head, arguments.draft_model)
            bench = Bench(size(config, directory), specs)
        settings = chosen(bench.settings, arguments.settings)
        measured = measure(
            bench, loads, settings, num_rounds=arguments.rounds, max_tokens=arguments.max_tokens, display=display
        )
    return {"threads": arguments.threads, "rounds": arguments.rounds, **summary(measured)}


def main() -> None:
    """Measure and print."""
    arguments = parse(sys.argv[1:])
    restart_with(environment(arguments.threads))
    result = benchmark(arguments)
    if arguments.plot is not None:
        command = shlex.join(["python", "-m", "tests.bench.speculation", *sys.argv[1:]])
        arguments.plot.write_text(page(command, result), encoding="utf-8")
    if arguments.json:
        print(json.dumps(result))
    else:
        report(result)


if __name__ == "__main__":
    main()
