"""Our in-process engine, greedy: `python -m tests.bench.peers.run_slipstream MODEL THREADS [K|auto] [int8]`."""

import sys

from cluster.config import ServeConfig, SpeculativeConfig
from cluster.engine import Engine
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import size
from scheduler.request import SamplingParams
from tests.bench.peers.lines import Prompts, answer_lines
from worker.process import environment, restart_with


def main() -> None:
    """Answer lines."""
    model, threads, drafts = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    restart_with(environment(threads))

    def make():  # type: ignore[no-untyped-def]
        from worker.actor import build

        speculative = SpeculativeConfig() if drafts == "auto" else SpeculativeConfig(num_speculative_tokens=int(drafts))
        config = ServeConfig(
            model=model,
            threads=threads,
            speculative=speculative,
            quantization="int8" if "int8" in sys.argv else None,
            max_num_seqs=64,
            max_model_len=2048,
        )
        with Display() as display:
            sizes = size(config, resolve_model(model, display))
        [spec] = sizes.workers
        runner, _ = build(spec)
        engine = Engine([runner], sizes.scheduler)

        def generate(prompts: Prompts, max_tokens: int) -> Prompts:
            sampling = SamplingParams(temperature=0.0)
            ids = [engine.submit(prompt, sampling, max_tokens) for prompt in prompts]
            outputs = engine.run()
            return [outputs.pop(request_id).token_ids for request_id in ids]

        return generate

    answer_lines(make)


if __name__ == "__main__":
    main()
