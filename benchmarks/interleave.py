"""Time several calls against each other in one process, so that their ratios mean something.

Timing one thing after the other drifts by a factor of two on a shared machine. Here every round
times every call in a short batch, in an order that changes from round to round, with the garbage
collector off; of each call the fastest round counts, since noise only ever adds.
"""

from __future__ import annotations

import gc
import random
import timeit
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ORDER_SEED = 20240229


def fastest(calls: Mapping[str, Callable[[], object]], *, rounds: int, batch: int) -> dict[str, float]:
    """Return the nanoseconds of one call of each, in the fastest of the rounds.

    Parameters
    ----------
    calls
        What to time, by name; ``timed(function, *arguments)`` is a call with arguments.
    rounds
        How often every call gets its turn.
    batch
        Calls per turn: short, so that a disturbance spoils one turn and not a whole measurement.

    Returns
    -------
    dict[str, float]
        Nanoseconds per call, the loop around it included.
    """
    timers = {name: call.timer() if isinstance(call, timed) else timeit.Timer(call) for name, call in calls.items()}
    for timer in timers.values():
        timer.timeit(batch)  # the first calls choose kernels and warm the interpreter's caches
    best = dict.fromkeys(timers, float("inf"))
    names = list(timers)
    shuffle = random.Random(ORDER_SEED).shuffle  # noqa: S311 - an order of measurements, no secret
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(names)
            for name in names:
                best[name] = min(best[name], timers[name].timeit(batch) / batch)
    finally:
        if collecting:
            gc.enable()
    return {name: seconds * 1e9 for name, seconds in best.items()}


class timed:  # noqa: N801 - reads like the function call that it stands for
    """A call with its arguments, timed as the statement that a user would write.

    Parameters
    ----------
    function
        What is called.
    *arguments
        Its positional arguments.
    **named
        Its keyword arguments, written out in the timed statement.
    """

    def __init__(self, function: Callable[..., object], *arguments: object, **named: object) -> None:
        self.function = function
        self.arguments = arguments
        self.named = named

    def __call__(self) -> object:
        """Make the call once."""
        return self.function(*self.arguments, **self.named)

    def timer(self) -> timeit.Timer:
        """Return a timer whose statement is the plain call, with local names for all it needs."""
        names = {"function": self.function}
        written = []
        for index, value in enumerate(self.arguments):
            names[f"argument_{index}"] = value
            written.append(f"argument_{index}")
        for key, value in self.named.items():
            names[f"named_{key}"] = value
            written.append(f"{key}=named_{key}")
        setup = "; ".join(f"{name} = given[{name!r}]" for name in names)
        return timeit.Timer(f"function({', '.join(written)})", setup, globals={"given": names})
