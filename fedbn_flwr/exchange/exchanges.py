"""The server's loop over a round's exchanges, and which contributions it can use. Any carrier transmits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.limits import absurd, values_problem
from fedbn_flwr.messages.quote import shown

from .carriers import Answers, Carrier, ExchangesDone
from .codec import END, Agreement, Contribution

# The tensors of each kind of contribution.
_TENSORS: dict[str, set[str]] = {
    "moments": {"mean", "var"},
    "mean": {"mean"},
    "variance": {"var"},
    "gradients": {"mean", "var"},
    END: set(),
}
_MOST_EXCHANGES = 100_000  # that a round may have

# Gets the contributions by node, and nodes with their problems; returns the nodes that stay, in the order they count.
Admit = Callable[[int, Mapping[int, Contribution], Sequence[tuple[int, str]]], Sequence[int]]
# A function (tensors, keys) that says, by position, why tensors are too far from the others.
Outliers = Callable[[Sequence[Arrays], Sequence[str]], Mapping[int, str]]


def run_exchanges(
    carrier: Carrier,
    nodes: Sequence[int],
    admit: Admit,
    agree: Callable[[int, Sequence[Contribution]], Agreement],
    outliers: Outliers | None,
    report: Callable[[str, int, int], object],
    layers: int,
) -> ExchangesDone:
    """Run all exchanges of a round. A client without a usable contribution is left out of the rest of the round.

    `admit` and `agree` get the number of the exchange, 1 or more. `report` shows the progress, for which `layers` is
    the number of batch norms in the server's model.
    """
    agreement, passed = None, 0
    unfinished: list[str] = []  # a layer for each pass whose gradients are yet to come
    for step in range(1, _MOST_EXCHANGES):
        contributions, problems = judge(nodes, carrier.ask(nodes, step - 1, agreement), unfinished, outliers)
        if step == 1 or problems or len(contributions) < len(nodes):  # otherwise all stay, and are in order
            nodes = admit(step, contributions, problems)
        usable = [contributions[node] for node in nodes]
        agreement, kind, layer = agree(step, usable), usable[0].kind, usable[0].layer
        if kind == "gradients":
            unfinished.remove(layer)
            report("backward pass, layers", passed - len(unfinished), passed)
        elif kind != END:
            passed = len(unfinished) + 1
            report("forward pass, layers", passed, max(passed, layers))
            unfinished += [layer] * (kind != "mean")  # the variance follows
        if kind == END or (kind == "gradients" and not unfinished):
            return ExchangesDone(nodes, step, agreement)
    raise RunFailed(f"the clients have begun more than {_MOST_EXCHANGES:,} exchanges in a round")


def judge(
    nodes: Sequence[int], answers: Answers, unfinished: Collection[str], outliers: Outliers | None
) -> tuple[dict[int, Contribution], list[tuple[int, str]]]:
    """The contributions by node, and the problems of unusable ones; see `contribution_problems` for `unfinished`."""
    contributions = {node: answer for node in nodes if isinstance(answer := answers.get(node), Contribution)}
    refused = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    refused |= contribution_problems(contributions, unfinished)
    usable = [node for node in contributions if node not in refused]
    tensors = [contributions[node].tensors for node in usable]
    far = absurd(tensors, {}, () if usable and contributions[usable[0]].kind == "gradients" else ("var",))
    if usable and outliers is not None:
        far |= outliers(tensors, sorted(tensors[0]))
    refused |= {usable[i]: f"{contributions[usable[i]].kind}: {reason}" for i, reason in far.items()}
    return contributions, list(refused.items())


def contribution_problems(
    contributions: Mapping[int, Contribution], unfinished: Collection[str] = ()
) -> dict[int, str]:
    """Why contributions cannot be used, by node: they have a problem, or another form than most of the others.

    `unfinished` are the layers whose gradients are yet to come.
    """
    # The gate checks this in messages, and streams bypass it. It is fine if most clients report equal weights instead.
    large = {
        node: f"its batch has {contribution.batch} examples, but its data set has {contribution.examples}"
        for node, contribution in contributions.items()
        if contribution.batch > contribution.examples
    }
    refused = large if 2 * len(large) <= len(contributions) else {}
    refused |= {
        node: why
        for node, contribution in contributions.items()
        if (why := contribution_problem(contribution, unfinished)) is not None
    }
    forms = {node: _form(contribution) for node, contribution in contributions.items() if node not in refused}
    times = Counter(forms.values())
    # In a tie, the form of the first partition.
    most = min(forms, key=lambda node: (-times[forms[node]], contributions[node].partition or 0), default=0)
    others = {
        node: f"it sent {form}, but client {_number(most, contributions[most])} sent {forms[most]}; do all clients "
        "have the same model, whose forward calls the same layers?"
        for node, form in forms.items()
        if form != forms[most]
    }
    return refused | others


def contribution_problem(contribution: Contribution, unfinished: Collection[str] = ()) -> str | None:
    """Why a contribution cannot be used, or None."""
    kind = contribution.kind
    if not (contribution.batch and contribution.values):
        return (
            f"its batch has {contribution.batch} examples and {contribution.values} values per channel; expected one "
            "or more of each"
        )
    if kind not in _TENSORS:
        return f"it sent {shown(kind)}; expected one of {', '.join(_TENSORS)}"
    if kind == "gradients" and contribution.layer not in unfinished:
        return f"it sent gradients of the layer {shown(contribution.layer)}; expected one of {[*unfinished]}"
    if set(contribution.tensors) != _TENSORS[kind]:
        return f"{kind} has {sorted(contribution.tensors)}; expected {sorted(_TENSORS[kind])}"
    for name, array in contribution.tensors.items():
        if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
            return f"{name!r} is {array.dtype} of shape {array.shape}; expected floats, one per channel"
    return values_problem(contribution.tensors, () if kind == "gradients" else {"var"} & contribution.tensors.keys())


def _number(node: int, contribution: Contribution) -> int:
    return node if contribution.partition is None else contribution.partition


def _form(contribution: Contribution) -> str:
    """The properties that all contributions to one exchange must share."""
    arrays = (f"{name}: {array.dtype.str} {array.shape}" for name, array in contribution.tensors.items())
    return f"{contribution.kind} of the layer {shown(contribution.layer)} ({', '.join(arrays)})"
