"""The command `fedbn` as on a machine without matplotlib: drawing takes longer than the short runs of tests.

With PAUSE=SECONDS it waits before the messages of the local engine, so that a run is not over before a test stops it.
"""

import os
import sys
import time

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules have the names of others
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    from fedbn_flwr.commands.cli import main

    if "PAUSE" in os.environ:
        from fedbn_flwr import LocalGrid

        whole = LocalGrid.send_and_receive

        def paused(*args, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(float(os.environ["PAUSE"]))
            return whole(*args, **kwargs)

        LocalGrid.send_and_receive = paused  # type: ignore[method-assign]

    sys.exit(main())
