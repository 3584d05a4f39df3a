"""FLamby's server optimisers and weights, where those of this project differ: `fedbn run differences.yaml`."""

from flwr.serverapp import strategy as flower

from fedbn_flwr.messages.aggregate import weighted_mean
from fedbn_flwr.strategies import Scaffold

ETA = 0.01


class Adam(flower.FedAdam):
    """Without the correction of the bias of the moments."""

    def aggregate_train(self, server_round, replies):
        power = server_round + 1.0
        self.eta = ETA * (1 - self.beta_1**power) / (1 - self.beta_2**power) ** 0.5
        return super().aggregate_train(server_round, replies)


class Adagrad(flower.FedAdagrad):
    """With momentum."""

    def aggregate_train(self, server_round, replies):
        self.beta_1 = 0.9
        return super().aggregate_train(server_round, replies)


class ByExamples(Scaffold):
    """The server's control variate is the mean of the clients' by examples, and not with equal weights."""

    def after_round(self, round, replies, weights):
        super().after_round(round, replies, weights)
        changes = [reply.records["control"] for reply in replies]
        equal, by_examples = weighted_mean(changes, [1.0] * len(replies)), weighted_mean(changes, weights)
        for key, change in by_examples.items():
            self.memory.control[key] += len(replies) * (change - equal[key])
