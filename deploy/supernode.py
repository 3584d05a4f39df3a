"""`flower-supernode` with the same options, as a process that ends when the node has lost its server for good.

After an error of TLS, such as an expired certificate, and after a reply with status 500, Flower's program (1.41) never
connects again. But it keeps its own port open, so it looks healthy. Once its process ends, Docker, Kubernetes or
systemd starts it again.
"""

import os
import threading
import traceback

from flwr.supernode.cli import flower_supernode


def end_with(thread: threading.ExceptHookArgs) -> None:
    """Heartbeats are sent by a thread; without them, the server counts the node as offline."""
    threading.__excepthook__(thread)
    os._exit(1)


threading.excepthook = end_with
try:
    flower_supernode()
except Exception:  # not SystemExit, before which Flower closes the port itself
    traceback.print_exc()
os._exit(1)
