"""What the tasks are compared by, and which figures are better when lower."""

from __future__ import annotations

from fedbn_flwr import tasks
from fedbn_flwr.tasks import is_lower_better, title_of


def test_one_logit_decides_between_two_classes() -> None:
    found = {
        name: task.outputs(count) for (name, task), count in zip(tasks.TASKS.items(), [3, 2, 5, 4, 7, 1], strict=True)
    }
    assert found == {
        "classification": 3,
        "binary": 1,
        "multilabel": 5,
        "regression": 4,
        "segmentation": 7,
        "several": 1,
    }


def test_runs_of_a_task_are_compared_by_its_first_figure() -> None:
    assert {name: task.main for name, task in tasks.TASKS.items()} == {
        "classification": "accuracy", "binary": "accuracy", "multilabel": "macro_f1", "regression": "rmse",
        "segmentation": "mean_iou", "several": "loss",
    }  # fmt: skip
    for task in tasks.TASKS.values():
        assert {*task.reported} <= {*task.metrics} <= {*tasks.METRICS}
        assert {*task.losses} <= tasks.LOSSES.keys()


def test_losses_and_errors_are_better_when_lower() -> None:
    keys = ("rmse", "mae", "clients_own_loss", "validation_rmse", "best_test_mae", "relative_error", "train_loss_std")
    assert all(map(is_lower_better, keys))
    assert not any(map(is_lower_better, ("accuracy", "r2", "clients_own_auc", "glossary", "errors_found", "macro_f1")))


def test_figures_have_names_in_words() -> None:
    assert [title_of(name) for name in ("rmse", "mean_iou", "balanced_accuracy", "my_kappa")] == [
        "RMSE", "mean IoU", "balanced accuracy", "my kappa",
    ]  # fmt: skip
