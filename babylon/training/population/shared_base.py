"""Updates of several members on one frozen base, one after the other.

The base and the adapter of the member at work are in memory. The adapters of the others are on the
disk. A pass over the tree cannot be shared among members, because from the first adapted layer on
every member has hidden states of its own.
"""

from dataclasses import dataclass, field

from babylon.training.backends.own_trainer import is_shared, run_work
from babylon.training.backends.train_input import TrainInput
from babylon.training.trainable import SharedBase
from babylon.training.update_options import tuning_options
from babylon.training.update_result import Update


@dataclass(slots=True)
class Siblings:
    """The updates of the members from one parent."""

    parent: str
    _base: SharedBase | None = field(default=None, init=False)

    def train(self, work: TrainInput) -> Update:
        """Run a member's update. Blocking. The first one loads the base, unless processes do.

        Raises:
            WindowNotReadyError, TrainingError, ModelError: as ``update_checkpoint``.
        """
        if is_shared(work.settings.training):  # a base here would hold a GPU's memory for nothing
            return run_work(work)
        if self._base is None:
            self._base = SharedBase.below(self.parent, tuning_options(work.settings.training))
        try:
            return run_work(work, self._base)
        finally:
            self._base.restore()
