"""vLLM's offline engine, greedy: `python run_vllm.py DIRECTORY [NUM_NGRAM_DRAFTS]` in its own environment."""

import sys

from lines import Prompts, answer_lines


def main() -> None:
    """Answer lines."""
    directory, num_drafts = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0

    def make():  # type: ignore[no-untyped-def]
        from vllm import LLM, SamplingParams

        options = {}
        if num_drafts:
            options["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 4, "prompt_lookup_min": 2
            }  # fmt: skip
        llm = LLM(model=directory, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, **options)

        def generate(prompts: Prompts, max_tokens: int) -> Prompts:
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        return generate

    answer_lines(make)


if __name__ == "__main__":  # vLLM starts its engine's process by spawning this file
    main()
