"""What a node remembers between messages, in the one place where Flower keeps it: `Context.state`.

Flower's state lasts for one Flower run; an experiment may train several models in it. So a node's memory
carries the name of the training run it belongs to, and another run starts empty.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import pack, unpack

_RUN = "fedbn.run"
_ARRAYS = "fedbn.arrays."


class NodeState:
    """Named sets of arrays in a node's `Context.state`, of the training run `run`; None: whose they are."""

    def __init__(self, records: RecordDict, run: str | None = None) -> None:
        self.records = records
        if run is None:
            return
        owner = records.get(_RUN)
        if not isinstance(owner, ConfigRecord) or owner.get("name") != run:
            for key in [key for key in records if key == _RUN or key.startswith(_ARRAYS)]:
                del records[key]
            records[_RUN] = ConfigRecord({"name": run})

    def load(self, name: str) -> Arrays:
        """The arrays kept under `name`; empty where there are none."""
        record = self.records.get(_ARRAYS + name)
        return unpack(record) if isinstance(record, ArrayRecord) else {}

    def save(self, name: str, arrays: Arrays) -> None:
        self.records[_ARRAYS + name] = pack(arrays)

    def load_records(self, name: str) -> RecordDict:
        """The records kept under `name`; empty where there are none."""
        prefix = f"{_ARRAYS}{name}/"
        return RecordDict({key[len(prefix) :]: each for key, each in self.records.items() if key.startswith(prefix)})

    def save_records(self, name: str, records: RecordDict) -> None:
        for key, record in records.items():
            self.records[f"{_ARRAYS}{name}/{key}"] = record

    def forget(self, name: str) -> None:
        """Remove what is kept under `name`, arrays or records."""
        for key in [key for key in self.records if key == _ARRAYS + name or key.startswith(f"{_ARRAYS}{name}/")]:
            del self.records[key]
