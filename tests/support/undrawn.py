"""The command `fedbn` as on a machine without matplotlib: drawing takes longer than the short runs of tests."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules have the names of others
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    from fedbn_flwr.cli import main

    sys.exit(main())
