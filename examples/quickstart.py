"""One chat, streamed; then what a seed promises. First: `slipstream serve`."""

import sys

from cluster.client import Client

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    stream = client.chat([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)
    for output in stream:
        print(output.text, end="", flush=True)
    print()

    # The seed was drawn by the server. With it the same request gives the same tokens, drafts or not.
    first = client.generate("Once upon a time", max_tokens=32, temperature=0.8).result()
    seeded = client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=7)
    again = client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=7, max_drafts=0)
    assert seeded.result().token_ids == again.result().token_ids
    print(f"another start: {first.text!r}")

    scheduler = client.stats()["scheduler"]
    print(f"{scheduler['mean_acceptance_length']:.2f} tokens a step")
