"""A client's state: arrays and records that a node stores between messages.

The state is in `Context.state`, which Flower keeps for one Flower run until the node restarts. A Flower run may contain
several training runs, so the state has the name of its training run, and another run starts with an empty state.

With a state folder in the node config, `--node-config "state='/srv/fedbn-state'"`, the node also stores the state there
after each round in which it trained:

    FOLDER/RUN-TOKEN/client-2/round-17

The server draws the token when a training run begins and saves it in its checkpoint, so the states of two runs are
never confused. To train in round r, a client starts with the state of its latest round before r; to evaluate in round
r, with the state of its latest round up to r. So a server that resumes from an older checkpoint gets the same results.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fedbn_flwr.errors import MessageError, StorageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, pack, unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.storage import Rounds

_RUN = "fedbn.run"  # a record with the name of the training run and, in the state folder, the round
_ARRAYS = "fedbn.arrays."
LOCAL_ARRAYS = "fedbn.local"  # the arrays that stay on the client; other projects' rules use names without `fedbn.`


def run_of(config: Config) -> str | None:
    """The training run of a message; None if the server does not name one."""
    names = [str(config[key]) for key in (protocol.RUN, protocol.TOKEN) if key in config]
    return " ".join(names) or None


def round_of(config: Config) -> int:
    """The round of a message; 1 if the server does not number its rounds."""
    return int(config.get(protocol.ROUND, 1))


def partition_metric(context: Context) -> Metrics:
    """The node's partition if it has one; the server sorts replies by it, since node ids are random."""
    return {protocol.PARTITION: client_number(context)} if "partition-id" in context.node_config else {}


def client_number(context: Context) -> int:
    """The client's number, on which random draws depend: its partition or, without one, the node id."""
    return int(context.node_config.get("partition-id", context.node_id))


def _owner(state: RecordDict) -> Config:
    """The name of the run that a state belongs to and, in a folder, its round."""
    return configs_in(state).get(_RUN, {})


class NodeState:
    """Named sets of arrays in a node's `Context.state`.

    If the state belongs to another training run than `run`, it is deleted; with None this is not checked.
    """

    def __init__(self, content: RecordDict, run: str | None = None) -> None:
        self.content = content
        if run is not None and _owner(content).get("name") != run:
            self.forget("")
            content[_RUN] = ConfigRecord({"name": run})

    def load(self, name: str) -> Arrays:
        """The arrays stored as `name`; empty if there are none."""
        return unpack(arrays_in(self.content).get(_ARRAYS + name, {}))

    def save(self, name: str, arrays: Arrays) -> None:
        self.content[_ARRAYS + name] = pack(arrays)

    def forget(self, name: str) -> None:
        """Delete the arrays stored as names that begin with `name`."""
        for key in [key for key in self.content if key.startswith(_ARRAYS + name)]:
            del self.content[key]


@contextmanager
def stored_state(message: Message, config: Config, context: Context) -> Iterator[None]:
    """Restore the state from the state folder before a message is handled, and save it there after training."""
    states, kind = _states(config, context), message.metadata.message_type
    if states is None:
        yield
        return
    server_round, run = int(config[protocol.ROUND]), str(run_of(config))
    is_after = kind.startswith(MessageType.EVALUATE) or kind == protocol.STATISTICS_QUERY
    _restore(states, context, run, server_round if is_after else server_round - 1)
    yield
    if not kind.startswith(MessageType.TRAIN):
        return
    context.state[_RUN] = ConfigRecord({"name": run, "round": server_round})
    states.write(server_round, dump(context.state), int(config.get(protocol.CHECKPOINT_ROUND, server_round - 1)))


def return_to_round(config: Config, context: Context) -> dict[str, int]:
    """Delete the states of rounds after `server-round`, from which the run resumes, and report the latest one left."""
    if (states := _states(config, context)) is None:
        return {}
    try:
        states.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=states.folder).close()
    except OSError as error:
        raise MessageError(
            f"the node config's state={str(states.folder.parent.parent)!r} is not a folder that this node can write to "
            f"({error.strerror}); give another folder, or change its owner"
        ) from None
    states.keep(range((last := int(config[protocol.ROUND])) + 1))
    return {protocol.STATE_ROUND: states.latest(last)}


def _states(config: Config, context: Context) -> Rounds | None:
    """This client's states in this training run.

    None if the node config has no state folder, or if the message names no run or round, as when the server only asks
    for the partition.
    """
    folder, token = context.node_config.get("state"), str(config.get(protocol.TOKEN, ""))
    if not folder or not token or protocol.ROUND not in config:
        return None
    if not re.fullmatch(r"[0-9a-f]{32}", token):  # it becomes part of a path
        raise MessageError(f"{protocol.TOKEN} is {token!r}; expected 32 hexadecimal digits")
    name = re.sub(r"[^A-Za-z0-9+=_-]+", "-", str(config.get(protocol.RUN, "run")))[:80]
    return Rounds(Path(str(folder)).expanduser() / f"{name}-{token}" / f"client-{client_number(context)}")


def _restore(states: Rounds, context: Context, run: str, last: int) -> None:
    """Load the state of the latest round up to `last`; an empty one if there is none."""
    wanted, state = states.latest(last), RecordDict()
    if {"round": 0, **_owner(context.state)} == {"name": run, "round": wanted}:
        return  # the context has this state; reloading it would delete the data of a layer-wise round in progress
    if wanted:
        try:
            state = parse(states.read(wanted), RecordDict)
        except StorageError as error:
            raise MessageError(
                f"the node's state {error}; restore the folder from a copy, or start a new run"
            ) from None
    state.update({name: record for name, record in context.state.items() if name.startswith(protocol.VOLATILE)})
    context.state.clear()
    context.state.update(state)
