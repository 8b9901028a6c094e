"""Runs several shares of one rank together, if a layer needs all of them at once.

BatchNorm's statistics are those of the whole batch, so a share cannot finish its forward pass
before every other one has reached the same layer. A rank with several shares runs each in its own
thread, one at a time and always in the same order: at a meeting a share lets the next one run, and
continues at its next turn. Only one thread computes at a time, so the result does not depend on
timing.

A share's own random streams and buffers are saved and restored around its meetings.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import accelerators
from lockstep.errors import ModelError
from lockstep.parallel.settings import TorchSettings


class Interleaver:
    """Runs bodies in turns; inside a body, ``meet`` waits until all others call it.

    Args:
        keep: copies a body's own state.
        restore: restores it.
        device: of their computation.
    """

    def __init__(
        self, keep: Callable[[], Any], restore: Callable[[Any], None], device: torch.device
    ) -> None:
        self._device = device
        self._keep = keep
        self._restore = restore
        self._turns: list[threading.Semaphore] = []
        self._finished: list[bool] = []
        self._meetings: list[int] = []
        self._failure: BaseException | None = None
        self.current = 0

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run all bodies to their ends.

        Raises:
            Exception: the error of the first body that failed.
        """
        self.current = 0
        if len(bodies) == 1:
            bodies[0]()
            return
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._finished = [False] * len(bodies)
        self._meetings = [0] * len(bodies)
        self._failure = None
        settings = torch.is_grad_enabled(), torch.get_num_threads(), TorchSettings.current()
        started = [
            # As daemons: an abandoned body that hangs must not keep the script from ending.
            threading.Thread(target=self._run_body, args=(index, body, *settings), daemon=True)
            for index, body in enumerate(bodies)
        ]
        try:
            for thread in started:
                thread.start()
            self._turns[0].release()
            for thread in started:
                thread.join()
        except BaseException as error:  # from a signal handler: the next body must not run
            self._failure = self._failure or error
            raise
        failure, self._failure = self._failure, None
        self._turns = []
        if failure is not None:
            raise failure

    def meet(self) -> None:
        """Let every other body run to its own ``meet``; then continue.

        Raises:
            ModelError: another body has ended instead.
        """
        if not self._turns:
            return
        own = self.current
        self._meetings[own] += 1
        kept = self._keep()
        self._hand_on(own)
        self._wait_for_turn(own)
        self._restore(kept)
        if self._left_behind(own):
            raise ModelError(
                "BatchNorm layers must run equally often for every share of a batch.",
                received="two shares that ran different numbers of BatchNorm layers",
                fix="Do not choose layers by the values of the samples before a BatchNorm.",
            )

    def _left_behind(self, own: int) -> bool:
        """True if a body has ended before this meeting."""
        return any(
            finished and meetings < self._meetings[own]
            for finished, meetings in zip(self._finished, self._meetings, strict=True)
        )

    def _run_body(
        self,
        index: int,
        body: Callable[[], None],
        grad: bool,
        threads: int,
        settings: TorchSettings,
    ) -> None:
        torch.set_grad_enabled(grad)  # these belong to a thread
        torch.set_num_threads(threads)
        try:
            self._wait_for_turn(index)
            accelerators.use(self._device)  # a setting of each thread
            # On a GPU all backward passes share a thread of autograd by default: one that waits for
            # its turn there would block the others.
            with settings.applied(), torch.autograd.set_multithreading_enabled(False):
                body()
        except _Abandoned:
            pass  # another body has failed: its error is raised
        except BaseException as error:
            self._failure = self._failure or error
        self._finished[index] = True
        self._hand_on(index)

    def _wait_for_turn(self, index: int) -> None:
        self._turns[index].acquire()
        self.current = index
        if self._failure is not None:
            raise _Abandoned

    def _hand_on(self, index: int) -> None:
        count = len(self._turns)
        for offset in range(1, count + 1):
            following = (index + offset) % count
            if not self._finished[following]:
                self._turns[following].release()
                return


class _Abandoned(BaseException):
    """Ends a body whose sibling has failed."""
