"""A node's memory on its own disk, where the operator gives it a folder: `--node-config "state='/srv/fedbn-state'"`.

Flower keeps a node's `Context.state` for one Flower run and one life of the node. With a folder the node also writes
it down after each round that it trained in, as it was then:

    FOLDER/RUN-TOKEN/client-2/round-17.safetensors

The token is drawn by the server when a training run begins and kept in its checkpoint, so that two runs never mix. A
client asked to train in round r begins with the memory of the latest round before r; asked to evaluate in round r,
with that of the latest round up to r. So a server that was resumed from an older checkpoint gets the same numbers.
Of what lies before the round that the server may come back to (`fedbn.kept-round`), the latest alone is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.serialization import dump, parse, write_whole

_OWNER = "fedbn.run"  # the record in a memory that names its run (NodeState's), and here the round it is of


@contextmanager
def remembered(message: Message, config: Mapping[str, Any], context: Context) -> Iterator[None]:
    """Around the handling of a message: the memory is what it has to be before, and written down after training."""
    folder = StateFolder.of(config, context)
    kind = message.metadata.message_type
    if folder is None or protocol.ROUND not in config:
        yield
        return
    server_round = int(config[protocol.ROUND])
    is_after = kind.startswith(MessageType.EVALUATE) or kind == protocol.STATISTICS_QUERY
    folder.recall(context, server_round if is_after else server_round - 1)
    yield
    if kind.startswith(MessageType.TRAIN):
        folder.keep(context, server_round, int(config.get(protocol.KEPT_ROUND, server_round - 1)))


def return_to(config: Mapping[str, Any], context: Context) -> dict[str, int]:
    """Where the run goes on after `server-round`: forget what came later, and tell which round the folder has."""
    folder = StateFolder.of(config, context)
    if folder is None or protocol.ROUND not in config:  # somebody asks for the partition alone
        return {}
    folder.check()
    return {protocol.STATE_ROUND: folder.forget_after(int(config[protocol.ROUND]))}


class StateFolder:
    """The memories of one client in one training run, by round."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run

    @classmethod
    def of(cls, config: Mapping[str, Any], context: Context) -> StateFolder | None:
        """None where the node has no folder, or the server does not say which run this is."""
        given, token = context.node_config.get("state"), str(config.get(protocol.TOKEN, ""))
        if not given or not token:
            return None
        if not re.fullmatch(r"[0-9a-f]{32}", token):  # it becomes part of a path
            raise MessageError(f"{protocol.TOKEN} is {token!r}; expected 32 hexadecimal digits")
        name = re.sub(r"[^A-Za-z0-9+=_-]+", "-", str(config.get(protocol.RUN, "run")))[:80]
        who = int(context.node_config.get("partition-id", context.node_id))
        run = protocol.run_of(config)
        assert run is not None
        return cls(Path(str(given)).expanduser() / f"{name}-{token}" / f"client-{who}", run)

    def check(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise MessageError(
                f"the node config's state={str(self.path.parent.parent)!r} is no folder that this node can write to "
                f"({error.strerror}); give another, or change its owner"
            ) from None

    def rounds(self) -> list[int]:
        """Those after which there is a memory, ascending."""
        found = (re.fullmatch(r"round-(\d+)\.safetensors", file.name) for file in self.path.glob("round-*"))
        return sorted(int(match[1]) for match in found if match)

    def recall(self, context: Context, last: int) -> None:
        """Make the node remember what it did after the latest round up to `last`; nothing where there is none."""
        wanted = max((server_round for server_round in self.rounds() if server_round <= last), default=0)
        owner = context.state.get(_OWNER)
        if isinstance(owner, ConfigRecord) and owner.get("name") == self.run and owner.get("round", 0) == wanted:
            return  # it does already, and may be in the middle of a layer-wise round
        found = self._read(wanted) if wanted else RecordDict()
        context.state.clear()
        context.state.update(found)

    def keep(self, context: Context, server_round: int, kept: int) -> None:
        """Write down what the node remembers after a round; `kept` is the round the server may come back to."""
        context.state[_OWNER] = ConfigRecord({"name": self.run, "round": server_round})
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(server_round), dump(context.state))
        except OSError as error:
            raise MessageError(f"cannot write the node's memory to {str(self.path)!r}: {error.strerror}") from None
        self.forget_after(server_round)
        rounds = self.rounds()
        oldest = max((each for each in rounds if each <= kept), default=0)
        for each in rounds:
            if each < oldest:
                self._file(each).unlink(missing_ok=True)

    def forget_after(self, server_round: int) -> int:
        """Drop the memories of later rounds, which are now yet to come; returns the latest that is left, or 0."""
        rounds = self.rounds()
        for each in rounds:
            if each > server_round:
                self._file(each).unlink(missing_ok=True)
        return max((each for each in rounds if each <= server_round), default=0)

    def _file(self, server_round: int) -> Path:
        return self.path / f"round-{server_round}.safetensors"

    def _read(self, server_round: int) -> RecordDict:
        file = self._file(server_round)
        try:
            return parse(file.read_bytes())
        except (OSError, ValueError) as error:
            raise MessageError(f"this node's memory {str(file)!r} cannot be read: {error}") from None
