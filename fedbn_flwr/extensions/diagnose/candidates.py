"""The strategies that a diagnosis proposes, and the experiment that decides between them (docs/which-strategy.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedbn_flwr.experiment.settings import Settings, name_in
from fedbn_flwr.messages.protocol import MIN_BATCH
from fedbn_flwr.trees import Draft

_RATES = (0.3, 1, 3)  # of the run's own

GROUP_NORM: Draft = {"model": {"norm": "gn"}}

Proposed = Mapping[str, tuple[Draft, str]]  # by label: the changes to batch norm, and what speaks against it


def answers(
    run: Settings, own_models: bool, error: float, dealt: float, labels: float | None, inputs: float | None
) -> dict[str, str]:
    """The answers to the five questions, as far as the settings and the measurements have them."""
    train, some = run.train, run.strategy.get("fraction_train", 1.0)
    amount, unit = (train.steps, "step") if train.steps else (train.epochs or 1, "epoch")
    work = f"{amount} {unit}{'s' * (amount > 1)}"
    chance = f", {dealt:.2f} with the same examples dealt at random" if math.isfinite(dealt) else ""
    apart = {"labels": labels, "inputs": inputs}
    known = [f"{what} apart {value:.2f}" for what, value in apart.items() if value is not None]
    return {
        "batch norm's error": f"{error:.2f}{chance}",
        "models": "each client may have its own" if own_models else "one for all",
        "what differs": ", ".join(known) or "not known: the clients took part in no survey",
        "local training": f"{work} with batches of {train.batch_size}, {run.rounds} rounds",
        "clients": f"{run.training_clients}, of which {some:.0%} take part in a round",
    }


def propose(run: Settings, own_models: bool, labels: float | None) -> Proposed:
    """Two or three candidates that suit the answers."""
    lower, clients = {"lr_factor": 0.1}, run.training_clients
    after = f"needs rounds after its freeze, {run.rounds - run.rounds // 2} here, at a lower rate"
    fixbn = {"strategy": {"name": "FixBN", "freeze_round": 0.5, **lower}}, after
    if own_models:
        few = "" if labels is None else f" (labels apart {labels:.2f})"
        fedbn = (
            {"strategy": {"name": "FedBN"}},
            f"not for classes that a client lacks{few}; a newcomer has no batch norm",
        )
        alone = {"strategy": {"name": "Standalone"}}, "learns nothing from the other clients, and has no global model"
        return {"FixBN": fixbn, "FedBN": fedbn, "Standalone": alone}
    by_sgd = name_in(run.train.optimizer) == "sgd" and run.train.clip is None
    tan = {"strategy": {"name": "FedTANII", "fedtan_rounds": 0.1, **lower}}
    messages = f"two more messages for each batch norm, to all {clients} clients, in the first tenth of the rounds"
    return {
        "FedAvg+GN": (GROUP_NORM, "in a deep network FixBN is often better; not for a pretrained network"),
        "FixBN": fixbn,
        **({"FedTANII": (tan, messages)} if by_sgd and run.train.batch_size >= MIN_BATCH else {}),
    }


def experiment_of(run: Settings, name: str, proposed: Proposed, *, central: bool) -> Draft:
    """An experiment that tunes the rate of each candidate, of batch norm and of group norm, and repeats it by seeds."""
    content = run.model_dump(mode="json", exclude_unset=True, exclude={"label", "cell", "size", "seed", "strategy"})
    content |= {"model": {**content.get("model", {}), "norm": "bn"}, "name": name, "seeds": [*range(5)]}
    content.get("evaluate", {}).pop("validation", None)  # tuning holds some examples out
    runs: Draft = {"FedAvg+BN": {}, "FedAvg+GN": GROUP_NORM, **{label: own for label, (own, _) in proposed.items()}}
    if central and not run.evaluate.unseen.clients:
        moments = {"normalise": "moments"} if run.data.normalise == "own" else {}
        batch = {"batch_size": run.train.batch_size * run.clients, "of_clients": []}
        runs["Centralised"] = {"clients": 1, "data": {"partition": {"kind": "iid"}, **moments}, "train": batch}
    return {**content, "tune": {"train.lr": [float(f"{run.train.lr * factor:.2g}") for factor in _RATES]}, "runs": runs}
