"""The random-number generators of a rank, those that Megatron-Core tracks among them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from fivefold.engine.state.training_state import TorchGenerators

_PREFIX = "megatron/"


class MegatronGenerators(TorchGenerators):
    """Torch's generators, and Megatron-Core's, whose names begin with `megatron/`."""

    def states(self) -> dict[str, Tensor]:
        """Return the state of each generator by name, uint8 on the CPU."""
        tracked = get_cuda_rng_tracker().get_states()
        return super().states() | {f"{_PREFIX}{name}": state for name, state in tracked.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators to states that `states` has returned."""
        super().set_states(states)
        tracked = {name: state for name, state in states.items() if name.startswith(_PREFIX)}
        get_cuda_rng_tracker().set_states({name.removeprefix(_PREFIX): state for name, state in tracked.items()})
