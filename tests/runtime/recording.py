"""What was recorded of a state's layers."""

from torch import Tensor

from keepsight.runtime.state import State


def recorded(state: State, name: str) -> list[Tensor]:
    """The `queries` or `accumulated` attention of each layer; none where nothing of the kind was recorded."""
    found = [getattr(layer.recorded, name, None) for layer in state.layers]
    return [each for each in found if each is not None]
