"""Triton kernels of the worker, each beside a plain torch `_reference`. Importing a module here needs triton."""
