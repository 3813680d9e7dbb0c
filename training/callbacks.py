"""Callbacks for any `transformers.Trainer`."""

import json
from pathlib import Path

from transformers import TrainerCallback


class MetricsFileCallback(TrainerCallback):
    """
    Appends every log event of a `Trainer` to a file as it happens, one JSON object with its `step` per line.

    ```python
    >>> trainer = Trainer(model, args, callbacks=[MetricsFileCallback()])
    ```
    """

    def __init__(self, file_name: str = "metrics.jsonl"):
        """Writes to `file_name` inside the Trainer's `output_dir`."""
        self.file_name = file_name

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
