"""Keys of metrics come back from their text, and have titles and digits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.results.metric_key import WHOSE, MetricKey
from fedbn_flwr.tasks import METRICS

PARTS = st.sampled_from([*filter(None, WHOSE), *METRICS, "loss", "examples", "std", "worst_tenth", "sea", "x_y", ""])


@given(st.text() | st.lists(PARTS, max_size=5).map("_".join))
def test_a_key_comes_back_from_any_text(text: str) -> None:
    assert str(MetricKey.parse(text)) == text


def test_the_parts_of_a_key_are_told_apart() -> None:
    more = (("", ""), ("sea", ""), ("", "std"), ("north_sea", "worst_tenth"))
    keys = [MetricKey(name, whose, *each) for name, whose, each in itertools.product(METRICS, WHOSE, more)]
    assert [MetricKey.parse(str(key)) for key in keys] == keys
    assert len({*map(str, keys)}) == len(keys)


def test_a_domain_follows_a_name_that_is_known() -> None:
    assert MetricKey.parse("clients_loss_sea") == MetricKey("loss_sea", "clients")
    assert MetricKey.parse("clients_loss_sea", "loss", "loss_s") == MetricKey("loss", "clients", "sea")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("accuracy", "accuracy"),
        ("train-loss", "train_loss"),
        ("own-macro-f1", "own_macro_f1"),
        ("own@sea-accuracy", "own_accuracy_sea"),
        ("@north_sea-mean-iou", "mean_iou_north_sea"),
        ("own@sea-num-examples", "own_examples_sea"),
    ],
)
def test_a_domain_is_last_in_the_history(sent: str, kept: str) -> None:
    assert str(MetricKey.of_message(sent)) == kept


@pytest.mark.parametrize(
    ("key", "title", "fraction"),
    [
        ("accuracy", "accuracy", True),
        ("accuracy_real", "accuracy, domain real", True),
        ("auc_sea", "AUC, domain sea", True),
        ("clients_own_dice_sea", "dice on own data, domain sea", True),
        ("clients_own_macro_f1", "macro F1 on own data", True),
        ("clients_own_accuracy_worst_tenth", "accuracy on own data, mean of the worst tenth", True),
        ("clients_accuracy_std", "clients' accuracy, deviation over clients", True),
        ("mae_sea", "MAE, domain sea", False),
        ("clients_own_rmse_sea", "RMSE on own data, domain sea", False),
        ("best_test_rmse", "best RMSE on test", False),
        ("train_loss", "training loss", False),
        ("my_metric", "my metric", False),
        ("accuracy_std", "accuracy, deviation over clients", True),
        ("clients_own_macro_f1_a_b_worst_tenth", "macro F1 on own data, domain a_b, mean of the worst tenth", True),
        ("validation_accuracy", "validation accuracy", True),
        ("best_round", "best round", False),
        ("best_round_clients_own_accuracy", "accuracy on own data of the best round", True),
    ],
)
def test_measures_are_named_in_words(key: str, title: str, fraction: bool) -> None:
    measure = MetricKey.parse(key)
    assert str(measure) == key
    assert (measure.title, measure.is_fraction, measure.scale) == (title, fraction, 100 if fraction else 1)


@pytest.mark.parametrize(
    ("values", "digits"),
    [
        ([0.5], 4),
        ([9.9], 4),
        ([10.0, 0.1], 3),
        ([99_999.0], 0),
        ([1234.5], 1),
        ([0.00123], 5),
        ([1e-15], 8),
        ([0.0], 4),
        ([float("nan")], 4),
    ],
)
def test_figures_are_shown_with_about_five_digits(values: list[float], digits: int) -> None:
    assert MetricKey.parse("rmse").digits(values) == digits
    assert MetricKey.parse("accuracy").digits(values) == 2
