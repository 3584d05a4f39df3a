"""The tracker `tensorboard`, which needs the package of that name."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedbn_flwr.errors import needs
from fedbn_flwr.trees import Tree

from .listeners.track import TrackedRun

with needs("tensorboard", "track=tensorboard"):
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams


class TensorBoard:
    """Event files in the run folder; `tensorboard --logdir DIR` shows all runs in DIR."""

    def __init__(self, run: TrackedRun) -> None:
        # Rounds after the checkpoint are repeated; TensorBoard then hides their first values.
        self.writer = SummaryWriter(str(run.folder), purge_step=run.done + 1 if run.done else None)
        experiment, start, self.success = hparams(dict(run.settings), {run.measure: 0.0, "loss": 0.0})
        self.writer.file_writer.add_summary(experiment)
        self.writer.file_writer.add_summary(start)

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def end(self, status: str, summary: Tree) -> None:
        self.writer.add_text("summary", f"```json\n{json.dumps(dict(summary), indent=2)}\n```")
        self.writer.add_text("status", status)
        if status == "finished":
            self.writer.file_writer.add_summary(self.success)
        self.writer.close()
