"""Training samples that are read when they are asked for."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from typing_extensions import override

from keepsight.data_gen.shards import TrainingSample


class LazySamples(Sequence[TrainingSample]):
    """A sequence of samples that holds none of them; a slice is a list."""

    @abstractmethod
    def read(self, place: int) -> TrainingSample:
        """The sample at an index.

        Args:
            place: From `-len(self)` to `len(self) - 1`.

        Raises:
            IndexError: there is none.
        """

    @overload
    def __getitem__(self, place: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, place: slice) -> list[TrainingSample]: ...
    @override
    def __getitem__(self, place: int | slice) -> TrainingSample | list[TrainingSample]:
        if isinstance(place, slice):
            return [self.read(each) for each in range(*place.indices(len(self)))]
        return self.read(place)
