"""A ClientApp without PyTorch, for workers that start quickly: it reports the GPU that its process sees."""

import os
import signal

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("place")
def place(message: Message, context: Context) -> Message:
    before = context.state.metric_records.get("had", MetricRecord({"count": 0}))["count"]
    assert isinstance(before, int)
    context.state["had"] = MetricRecord({"count": before + 1})
    gpu = int(os.environ.get("CUDA_VISIBLE_DEVICES", "-1"))
    return Message(RecordDict({"metrics": MetricRecord({"count": before + 1, "gpu": gpu})}), reply_to=message)


@app.query("die")
def die(message: Message, context: Context) -> Message:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
