"""Prints a line of progress every 50 steps."""

import time

_EVERY = 50


class Progress:
    """Mean loss, tokens per second and minutes left since the last line."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.step = name, steps, 0
        self.started = self.marked = time.perf_counter()
        self.loss, self.tokens, self.count = 0.0, 0, 0

    def add(self, loss: float, tokens: int) -> None:
        """Counts one step; prints at every 50th and at the last."""
        self.step += 1
        self.loss, self.tokens, self.count = self.loss + loss, self.tokens + tokens, self.count + 1
        if self.step % _EVERY and self.step != self.steps:
            return
        now = time.perf_counter()
        left = (now - self.started) / self.step * (self.steps - self.step) / 60
        speed = self.tokens / (now - self.marked)
        loss = self.loss / self.count
        print(
            f"{self.name} {self.step}/{self.steps} loss {loss:.4f} {speed:.0f} tok/s {left:.1f} min left",
            flush=True,
        )
        self.marked, self.loss, self.tokens, self.count = now, 0.0, 0, 0
