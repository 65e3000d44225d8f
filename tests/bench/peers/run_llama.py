"""llama.cpp, greedy, one request at a time: `python run_llama.py FILE.gguf THREADS [NUM_LOOKUP_DRAFTS]`."""

import sys

from lines import answer_lines


def main() -> None:
    """Answer lines."""
    path, threads, num_drafts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0

    def make():  # type: ignore[no-untyped-def]
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=num_drafts) if num_drafts else None
        llama = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False)

        def generate_one(prompt: list[int], max_tokens: int) -> list[int]:
            llama.reset()
            made: list[int] = []
            for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                made.append(token)
                if len(made) == max_tokens:
                    break
            return made

        return lambda prompts, max_tokens: [generate_one(prompt, max_tokens) for prompt in prompts]

    answer_lines(make)


if __name__ == "__main__":
    main()
