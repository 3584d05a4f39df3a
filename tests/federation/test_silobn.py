"""SiloBN where it differs from FedBN; test_fedbn.py has the tests that both share."""

from __future__ import annotations

import torch

from fedbn_flwr.experiment.registry import in_words
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, SiloBN
from tests.support.federations import Federations


def test_gamma_and_beta_are_averaged_with_the_weights(federation: Federations) -> None:
    """Batch norm trains with the batch's statistics, so the running ones, local or not, change no gradient."""
    fed = federation((8, 12), dtype=torch.float64)
    ours, twin = (unpack(rule().start(fed.grid(), fed.arrays(), num_rounds=3).arrays) for rule in (SiloBN, FedAvg))
    for key, value in twin.items():
        assert (ours[key].tobytes() == value.tobytes()) == ("running" not in key), key


def test_its_line_cites_its_own_paper() -> None:
    assert in_words("SiloBN").splitlines()[1].startswith("SiloBN (Andreux et al. 2020")
