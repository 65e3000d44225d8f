"""transformers, greedy: `python run_transformers.py DIRECTORY generate|lookup|batch`."""

import sys

from lines import Prompts, answer_lines


def main() -> None:
    """Answer lines."""
    directory, mode = sys.argv[1], sys.argv[2]

    def make():  # type: ignore[no-untyped-def]
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.eval()

        def settings(max_tokens: int) -> dict[str, object]:
            return {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}

        @torch.inference_mode()
        def generate(prompts: Prompts, max_tokens: int) -> Prompts:
            options = settings(max_tokens)
            if mode == "lookup":
                options["prompt_lookup_num_tokens"] = 4  # one request at a time is all that it can
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            return model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()

        @torch.inference_mode()
        def generate_batch(prompts: Prompts, max_tokens: int) -> Prompts:
            config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
            outputs = model.generate_batch(prompts, generation_config=config)
            return [output.generated_tokens for output in outputs.values()]

        return generate_batch if mode == "batch" else generate

    answer_lines(make)


if __name__ == "__main__":
    main()
