"""The checkpoint a worker computes with, and those it may be asked to swap to.

Another one is loaded ahead, beside the steps, and takes the place of the old one in a step: the same pool,
the same backend, other weights. Knows nothing about sessions; torch is imported with the first model.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.model import Model


class Checkpoints:
    """One model at a time, and the next one ready. Weights are named `NUMBER DIRECTORY`."""

    def __init__(self) -> None:
        self.current: str | None = None  # what was last swapped to
        self._model: Model | None = None
        self._prepared: tuple[str, Model] | None = None

    def begin(self, model: "Model") -> None:
        """The first."""
        self._model = model

    def prepare(self, weights: str) -> None:
        """Load these. ValueError says what is wrong with them; then nothing is held ready."""
        self._prepared = None
        if self._model is not None:  # else they are loaded when a step asks for them
            self._prepared = weights, self._load(weights, self._model)

    def swap(self, weights: str) -> "Model":
        """The model with these weights, loaded now unless it is ready. ValueError as for `prepare`."""
        assert self._model is not None
        if weights != self.current:
            prepared = self._prepared
            if prepared is None or prepared[0] != weights:
                prepared = weights, self._load(weights, self._model)
            self.current, self._model = prepared
            self._prepared = None
        return self._model

    def _load(self, weights: str, old: "Model") -> "Model":
        from worker.architecture import read_config
        from worker.model import load_model

        directory = Path(weights.partition(" ")[2])
        if not directory.is_dir():
            raise ValueError(f"there is no directory {directory}")
        if read_config(directory) != old.config:
            raise ValueError(f"{directory}: is of another architecture than what is served")
        model = load_model(
            directory,
            dtype=old.dtype,
            device=old.device.type,
            attention="cpu" if old.device.type == "cpu" else "triton",
            num_blocks=1,
            block_size=old.kv_cache.block_size,
            max_model_len=old.max_model_len,
            quantization=old.quantization,
        )
        # The pool and the backend over it stay: what the pool holds of the old weights nobody reads again.
        model.kv_cache, model.attention = old.kv_cache, old.attention
        return model
