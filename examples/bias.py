"""Why batch norm breaks federated averaging: the error of a round's mean gradient by the clients' skew, in float64.

`python bias.py` prints two tables within seconds, and batch_norm.ipynb also draws them. A round is one step on all data
of two clients with the strategies themselves. With skew 0 both clients have equal data; with skew 1 each has a class of
its own.

The first table has the smallest example, whose bias is known exactly: a number x = y m ± s is mapped to its class
y = ±1 by a single batch norm, output = gamma (x - mean) / deviation + beta, with the loss (output - y)² / 2. With the
class shares (1 ± a) / 2 a client's batch has the variance s² + m² (1 - a²), and that of both clients s² + m².

The second table has a network with two batch norms.
"""

import copy
import logging
from math import sqrt

import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, client_app, convert_norm
from fedbn_flwr.strategies import FedAvg, FedAvgGlobalStats, FedTAN, FixBN

DOUBLE = {"dtype": torch.float64}
ALL = {"fraction_evaluate": 0.0}  # only training


# --- a single batch norm --------------------------------------------------------------------------


def fixed_point(skew, m=1.0, s=0.7):
    """The gamma at which the clients' mean gradient is zero; with skew 0 that of all data, m / sqrt(s² + m²)."""
    within = m * (1 - skew**2)
    return within / sqrt(s**2 + m * within)


def bias(skew, m=1.0, s=0.7):
    """The gradient of gamma, mean of the clients minus that of all data. It does not depend on gamma and beta."""
    return fixed_point(0, m, s) - fixed_point(skew, m, s)


def two_signs(skew, m=1.0, s=0.7, examples=64):
    """The clients' data: x = y m ± s for each y, of which a client's share (1 + skew) / 2 has one sign."""
    clients = []
    for sign in (1, -1):
        same = round(examples * (1 + skew) / 2)
        y = sign * torch.tensor([[1.0]] * same + [[-1.0]] * (examples - same), **DOUBLE)
        clients.append((torch.cat([y * m + s, y * m - s]), torch.cat([y, y])))
    return clients


def single_norm(gamma=0.3, beta=0.1):
    """A batch norm whose eps is too small to change a variance."""
    model = nn.Sequential(nn.BatchNorm1d(1, eps=1e-30, **DOUBLE))
    nn.init.constant_(model[0].weight, gamma)
    nn.init.constant_(model[0].bias, beta)
    return model


def squared(outputs, targets):
    return (outputs - targets).square().mean() / 2


# --- a network ------------------------------------------------------------------------------------


def two_classes(skew, examples=40):
    """The clients' data: points around two centres, each point twice, so that equal halves can be made.

    All data are the same whatever the skew: it moves examples from one client to the other.
    """
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(2, 6, generator=generator, **DOUBLE)
    one, other = ((c + torch.randn(examples, 6, generator=generator, **DOUBLE)).repeat(2, 1) for c in centres)
    many = round(examples * (1 + skew))
    few = 2 * examples - many
    labels = torch.tensor([0] * many + [1] * few), torch.tensor([0] * few + [1] * many)
    inputs = torch.cat([one[:many], other[:few]]), torch.cat([one[many:], other[few:]])
    return list(zip(inputs, labels, strict=True))


def two_norms():
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8, **DOUBLE), nn.BatchNorm1d(8, **DOUBLE), nn.ReLU()]
    layers += [nn.Linear(8, 6, **DOUBLE), nn.BatchNorm1d(6, **DOUBLE), nn.ReLU(), nn.Linear(6, 2, **DOUBLE)]
    return nn.Sequential(*layers)


# --- rounds ---------------------------------------------------------------------------------------


def union(clients):
    """All data as those of one client."""
    return tuple(torch.cat(parts) for parts in zip(*clients, strict=True))


def with_statistics_of(clients, model):
    """The model, whose running statistics are those of all data."""
    inputs, _ = union(clients)
    layers = [layer for layer in model if isinstance(layer, nn.BatchNorm1d)]
    for layer in layers:
        layer.momentum = 1.0
    with torch.no_grad():
        model.train()(inputs)
    for layer in layers:  # PyTorch multiplies the variance of n values by n / (n - 1)
        layer.running_var *= 1 - 1 / len(inputs)
    return model


def after_rounds(strategy, model, clients, rounds, loss=F.cross_entropy, lr=1.0):
    """The state of the global model before the first round and after each; a round is one step on all data."""

    def make_client(context):
        own = clients[context.node_config["partition-id"]]
        return BNClient(copy.deepcopy(model), [own], loss=loss, lr=lr)

    states = []
    strategy.start(
        LocalGrid(client_app(make_client), len(clients)),
        ArrayRecord(model.state_dict()),
        num_rounds=rounds,
        evaluate_fn=lambda _, arrays: states.append(arrays.to_torch_state_dict()),
    )
    return states


def mean_gradient(strategy, model, clients, loss=F.cross_entropy):
    """The mean gradient of a round: by how much a step with the learning rate 1 changes the parameters."""
    before, after = after_rounds(strategy, model, clients, 1, loss)
    return {name: before[name] - after[name] for name, _ in model.named_parameters()}


def full_gradient(model, clients, loss=F.cross_entropy, *, frozen=False):
    """The gradient of all data in one place, perhaps with frozen statistics."""
    model = copy.deepcopy(model).train()
    for layer in model if frozen else ():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()
    inputs, targets = union(clients)
    loss(model(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def error(found, right):
    """The norm of the difference, relative to that of the right gradient."""
    norms = [torch.cat([each[name].flatten() for name in right]) for each in (found, right)]
    return float((norms[0] - norms[1]).norm() / norms[1].norm())


def errors(skew):
    """The relative error of a round's mean gradient, by strategy."""
    clients = two_classes(skew)
    with_bn, with_gn = two_norms(), convert_norm(two_norms(), "gn")
    right, frozen = full_gradient(with_bn, clients), with_statistics_of(clients, two_norms())
    return {
        "FedAvg+BN": error(mean_gradient(FedAvg(**ALL), with_bn, clients), right),
        "Algorithm 2": error(mean_gradient(FedAvgGlobalStats(**ALL), with_bn, clients), right),
        "FedTAN": error(mean_gradient(FedTAN(**ALL), with_bn, clients), right),
        "FixBN": error(
            mean_gradient(FixBN(FedAvg(**ALL), freeze_round=0), frozen, clients),
            full_gradient(frozen, clients, frozen=True),
        ),
        "FedAvg+GN": error(mean_gradient(FedAvg(**ALL), with_gn, clients), full_gradient(with_gn, clients)),
    }


def biases(skew, m=1.0, s=0.7):
    """Of a single batch norm: the bias of gamma's gradient, and the gamma that each strategy converges to."""
    clients = two_signs(skew, m, s)
    gradients = [
        mean_gradient(FedAvg(**ALL), single_norm(), clients, squared),
        full_gradient(single_norm(), clients, squared),
    ]
    found, right = (float(each["0.weight"]) for each in gradients)
    cases = {
        "FedAvg": (FedAvg(**ALL), single_norm()),
        "FixBN": (FixBN(FedAvg(**ALL), freeze_round=0), with_statistics_of(clients, single_norm())),
        "FedTAN": (FedTAN(**ALL), single_norm()),
    }  # a round moves gamma by nine tenths of the way
    after = {name: after_rounds(*case, clients, 20, squared, lr=0.9)[-1] for name, case in cases.items()}
    return {"bias": found - right, **{name: float(state["0.weight"]) for name, state in after.items()}}


def gammas(skew, rounds=30, lr=0.2):
    """Of a single batch norm: gamma before the first round of federated averaging and after each."""
    states = after_rounds(FedAvg(**ALL), single_norm(1.0, 0.0), two_signs(skew), rounds, squared, lr=lr)
    return [float(state["0.weight"]) for state in states]


# --- output ---------------------------------------------------------------------------------------

SKEWS = (0, 0.2, 0.4, 0.6, 0.8, 1)
BROWN, VIOLET, GREEN = "#c2410c", "#7c3aed", "#047857"


def axes(**words):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.5), layout="constrained", facecolor="white")
    only = figure.subplots()
    only.spines[["top", "right"]].set_visible(False)
    only.set(**words)
    return only


def plot_errors():
    """A figure of matplotlib: the relative error of a round's mean gradient, by skew."""
    only, rows = axes(xlabel="class skew a", ylabel="error of the gradient, relative"), [errors(a) for a in SKEWS]
    for name, label, colour in (
        ("Algorithm 2", "FedAvg + Algorithm 2", VIOLET),
        ("FedAvg+BN", "FedAvg", BROWN),
        ("FedTAN", "FedTAN, FixBN after the freeze, group norm", GREEN),
    ):
        only.plot(SKEWS, [row[name] for row in rows], "o-", color=colour, label=label, gid=name.replace(" ", "-"))
    only.legend(frameon=False, loc="upper left")
    return only.figure


def plot_gammas():
    """A figure of matplotlib: the gamma of a single batch norm, by round and skew."""
    only = axes(xlabel="round", ylabel="gamma", xlim=(0, 36), ylim=(-0.05, 1.05))
    for skew in (0, 0.5, 0.75, 1):
        values = gammas(skew)
        label = None if skew else "FedAvg"
        only.plot(values, color=BROWN, label=label, gid=f"gamma-{skew:g}")
        only.annotate(f"a = {skew:g}", (len(values) - 1, values[-1]), (4, 0), textcoords="offset points", va="center")
    only.hlines(fixed_point(0), 0, 30, color=GREEN, linestyle=":", label="FedTAN and FixBN, for every a")
    only.legend(frameon=False, loc=(0.4, 0.14))
    return only.figure


def table(rows, digits):
    head, *_ = rows.values()
    lines = [["skew", *head], *([f"{skew:g}", *(f"{x:{digits}}" for x in row.values())] for skew, row in rows.items())]
    return "\n".join("".join(f"{cell:>13}" for cell in line) for line in lines)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(
        "One batch norm: the bias of gamma's gradient, and the gamma that strategies converge to; by the formulas, then"
    )
    print("by training:\n")
    exact = {a: {"B(a)": bias(a), "gamma": fixed_point(a), **biases(a)} for a in (0, 0.25, 0.5, 0.75, 1)}
    print(table(exact, "z.6f"))
    print("\nA network with two batch norms: the relative error of the mean gradient:\n")
    print(table({a: errors(a) for a in SKEWS}, ".2g"))
