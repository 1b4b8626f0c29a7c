"""`train.minutes`: the time that a run has used, and the number of steps that ends it on time.

The steps are decided where the learning rate begins to decay, from what a step has lately taken, validation and
checkpoints included; until then all steps have the same rate, so none would have been another.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, replace

from glasshouse.training.schedule import WSD

FINISH, FINISH_SECONDS = 0.01, 3.0  # of the time, and beside it: saving the model, plots, texts of the last report
REPORT = 0.03  # of the time, at most: the loss over the validation set in the last report
MOST_EPOCHS = 5  # of the text: with more, the loss on other text rises again
FORWARD = 1 / 3  # of the time of a training step, per sample


def clock() -> float:
    """Return the seconds of a clock that never goes back; all that `train.minutes` measures goes by it."""
    return time.monotonic()


@dataclass(frozen=True)
class Length:
    """The end of a run: its steps, and the validation samples of the last report."""

    steps: int
    report_samples: int


def decay_from(schedule: WSD, done: int, steps: int) -> WSD:
    """Return the schedule whose decay begins after `done` steps and ends with the last of `steps`.

    The first `done` steps keep a factor of exactly 1, whatever is rounded: the decay begins half a step later.

    >>> schedule = decay_from(WSD(warmup=1, final_factor=0.0), done=4, steps=6)
    >>> [round(schedule.factor(step, 6), 2) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.67, 0.0]
    """
    return replace(schedule, decay_fraction=(steps - done - 0.5) / (steps - 1 - schedule.warmup))


class Budget:
    """The seconds of a run; `began` is when its process began, `spent` what earlier processes have taken.

    The rate of steps is that of the training loop, in all processes.
    """

    def __init__(self, minutes: float, began: float) -> None:
        self.seconds, self.began = 60 * minutes, began
        self.spent = self.spent_in_loop = 0.0
        self.loop_began = began
        self._marks = [(0, 0.0)]  # steps done, and the seconds of the loop until then

    def resume(self, spent: float, spent_in_loop: float) -> None:
        """Count what earlier processes have taken."""
        self.spent, self.spent_in_loop = spent, spent_in_loop

    def begin_loop(self) -> None:
        """Start the clock of the training loop."""
        self.loop_began = clock()

    @property
    def used(self) -> float:
        """The seconds that the run has taken."""
        return self.spent + clock() - self.began

    @property
    def used_in_loop(self) -> float:
        """The seconds that the training loop has taken, validation and checkpoints included."""
        return self.spent_in_loop + clock() - self.loop_began

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.seconds - self.used

    def decide(
        self, done: int, steps: int, schedule: WSD, *, batch_size: int, samples: int, val_samples: int
    ) -> Length | None:
        """Return the end of the run if its decay is to begin now, after `done` steps of those planned.

        That is where the plan begins it, or sooner if less than the decay's part of the time is left. To be called
        before every step.
        """
        per_step = self._seconds_of_a_step(done)
        if done <= schedule.warmup:
            return None
        per_sample = FORWARD * per_step / batch_size
        report_samples = min(val_samples, max(1, int(REPORT * self.seconds / per_sample)))
        left = self.left - FINISH * self.seconds - FINISH_SECONDS - report_samples * per_sample
        is_late = left <= schedule.decay_fraction * (self.used_in_loop + left)
        if schedule.factor(done, steps) == 1 and not is_late:
            return None
        most = MOST_EPOCHS * samples // batch_size
        steps = max(done + 1, min(most, done + int(left / per_step)))
        return Length(steps, report_samples)

    def _seconds_of_a_step(self, done: int) -> float:
        """Return what each of the later half of the steps has taken, as a machine may have become slower.

        After a resume, the steps of earlier processes are known by their sum alone.
        """
        used = self.used_in_loop
        while len(self._marks) > 1 and self._marks[-1][0] >= done:
            self._marks.pop()  # rolled back
        half = bisect.bisect_right(self._marks, done / 2, key=lambda mark: mark[0]) - 1
        before, seconds = self._marks[half]
        self._marks.append((done, used))
        return (used - seconds) / max(1, done - before)
