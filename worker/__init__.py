"""The worker: model, paged KV cache, drafters and the runner. Knows nothing about Ray, gRPC or text."""
