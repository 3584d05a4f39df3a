"""`flower-supernode` with the same options, as a process that answers every message or ends.

Flower's program (1.41) can look healthy and online, and handle nothing:

- After an error of TLS, such as an expired certificate, and after a reply with status 500, it never connects again.
  Here its process ends, so that Docker, Kubernetes or systemd starts it again.
- It sends replies only after it has received another message. If a ClientApp replies after Flower has given it up,
  all later replies are one message late. Here a reply doesn't wait for the next message.
- It waits without end for the reply, or for the rest of it, of a ClientApp that has ended without one. Here the server
  gets an error as soon as no ClientApp works on the message.

The log says what the node has been waiting for, after a minute and then at doubling intervals.
"""

import logging
import os
import sys
import threading
import time
import traceback

FIRST = 60.0  # seconds until the log says what the node waits for


def end_with(thread: threading.ExceptHookArgs) -> None:
    """Heartbeats are sent by a thread; without them, the server counts the node as offline."""
    threading.__excepthook__(thread)
    os._exit(1)


class Waiting:
    """What the node waits for, and the last message that it has handled."""

    what, began, next, last = "", 0.0, FIRST, "none yet"
    seen: frozenset[str] = frozenset()  # the messages that were there before

    def says(self, what: str, level: int = logging.WARNING) -> None:
        now = time.monotonic()
        if what != self.what:
            self.what, self.began, self.next = what, now, FIRST
        if now - self.began >= self.next:
            logging.getLogger("flwr").log(level, "waiting for %s since %.0f s", what, now - self.began)
            self.next *= 2


def mend() -> None:
    """Replace the steps of Flower's loop that may wait without end."""
    from flwr.common.constant import Status
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.nodestate import in_memory_nodestate as nodestate

    receive, push, state_class = loop._pull_and_store_message, loop._push_messages, nodestate.InMemoryNodeState
    take, waiting, unfinished = (
        state_class.get_messages_legacy,
        Waiting(),
        [Status.PENDING, Status.STARTING, Status.RUNNING],
    )

    def receive_or_send(*, state, **given):
        """The run of a message, or of a reply to send; None if there is neither."""
        run_id = receive(state=state, **given)
        for entry in [*state.msg_store.values()]:
            about = entry.message.metadata
            if about.message_id not in waiting.seen:
                waiting.last = f"{about.message_type} message of run {about.run_id}"
            if about.reply_to_message_id and not entry.is_retrieved:
                run_id = about.run_id
        waiting.seen = frozenset(state.msg_store)
        if run_id is None:
            waiting.says(f"messages of the server (the last one: {waiting.last})", logging.INFO)
        return run_id

    def messages(state, *, is_reply=None, **given):
        """Those of Flower; if nobody works on a reply, an error."""
        found = take(state, is_reply=is_reply, **given)
        if not is_reply or found:
            return found
        if tasks := state.get_tasks(statuses=unfinished):
            is_begun = tasks[0].status.status == Status.RUNNING
            worker = "its ClientApp" if is_begun else "a ClientApp to begin (is superexec-clientapp running?)"
            waiting.says(f"{worker}: {waiting.last}")
            return found
        if found := take(state, is_reply=True):  # it came before the end of its ClientApp
            return found
        for entry in state.msg_store.values():
            entry.is_retrieved = True
        runs = {entry.message.metadata.run_id for entry in state.msg_store.values()}
        state._store_error_replies(runs, nodestate.CLIENT_APP_CRASHED_ERROR)
        return take(state, is_reply=True)

    class Parts:
        """The parts of replies, which a ClientApp hands over one by one."""

        def __init__(self, state, store):
            self.state, self.store = state, store

        def __getattr__(self, name):
            return getattr(self.store, name)

        def get(self, key):
            if (
                self.store.get(key) == b""
                and not self.state.get_tasks(statuses=unfinished)
                and self.store.get(key) == b""
            ):
                raise RuntimeError("its ClientApp ended before it had handed over the whole reply")
            return self.store.get(key)

    def push_whole(*, state, object_store, **given):
        push(state=state, object_store=Parts(state, object_store), **given)

    loop._pull_and_store_message, loop._push_messages = receive_or_send, push_whole
    state_class.get_messages_legacy = messages


if __name__ == "__main__":
    from flwr.supernode.cli import flower_supernode

    threading.excepthook = end_with
    try:
        mend()
    except (ImportError, AttributeError) as error:
        print(
            f"the SuperNode may wait without end, since this version of Flower is another one: {error}", file=sys.stderr
        )
    try:
        flower_supernode()
    except Exception:  # not SystemExit, before which Flower closes the port itself
        traceback.print_exc()
    os._exit(1)
