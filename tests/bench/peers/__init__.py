"""Other engines on the same prompts, weights and lengths; each in an environment of its own."""
