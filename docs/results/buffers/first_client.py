"""What a project does that averages `model.parameters()` and takes all buffers from the first client."""

from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import FedAvg


class FirstClient(FedAvg):
    """FedAvg whose running statistics are those of the first client, in the order of partitions."""

    def combine(self, round, replies, weights):
        mean, of = super().combine(round, replies, weights), roles(replies[0].arrays)
        return {key: replies[0].arrays[key] if of[key] is Role.STATISTICS else value for key, value in mean.items()}
