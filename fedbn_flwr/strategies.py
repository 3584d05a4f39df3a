"""Makes the folder `strategies/` of a checkout importable as `fedbn_flwr.strategies`, its name in a wheel.

It finds the folder by its path and does not import `strategies`, since another project may have a package of that name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies import *  # noqa: F403
    from strategies import __getattr__ as __getattr__
else:
    __path__ = [str(Path(__file__).resolve().parent.parent / "strategies")]
    from fedbn_flwr.strategies.__init__ import __dir__ as __dir__
    from fedbn_flwr.strategies.__init__ import __getattr__ as __getattr__
