"""The strategies, under the name they have in a wheel: here they lie in the folder `strategies/` beside this one.

The folder is taken by its path, not imported as `strategies`: another project on the path may have one too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies import *  # noqa: F403
else:
    __path__ = [str(Path(__file__).resolve().parent.parent / "strategies")]
    from fedbn_flwr.strategies.__init__ import *  # noqa: F403
