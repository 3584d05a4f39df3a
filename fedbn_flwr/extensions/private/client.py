"""The client rule of Private: clip the change of a round before it is sent and, for local privacy, add the noise."""

from __future__ import annotations

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import ClientRule, Key, Update
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies.fixbn import frozen_roles  # type: ignore[import-untyped]

from .noise import applied, change_of, clipped, gaussian, parts_of

CLIP = "fedbn.private-clip"
NOISE = "fedbn.private-noise"
STATISTICS_CLIP = "fedbn.private-statistics-clip"
STATISTICS_NOISE = "fedbn.private-statistics-noise"
NOISE_SEED = "fedbn.private-noise-seed"
KEYS = {"weights": (CLIP, NOISE), "statistics": (STATISTICS_CLIP, STATISTICS_NOISE)}  # by part of a change


class Private(ClientRule):
    """Clips the change of weights, gamma and beta, and that of the statistics; adds noise if the message asks for it.

    With noise the reply has neither the loss nor the number of examples, which would not be private.
    """

    keys = {
        CLIP: Key("float", "clip the change of weights, gamma and beta to this norm before it is sent"),
        NOISE: Key("float", "then add Gaussian noise with this multiple of the norm, and report no loss and no counts"),
        STATISTICS_CLIP: Key("float", "clip the change of mean and log variance to this norm before it is sent"),
        STATISTICS_NOISE: Key("float", "then add Gaussian noise with this multiple of that norm"),
        NOISE_SEED: Key("int", "draw the noise from this seed instead of the system's random numbers: not private"),
    }
    order = 10  # after all rules that change what is sent

    def finish(self, update: Update) -> None:
        config, before = self.local.config, self.local.received
        if update.extras or (extra := sorted(update.arrays.keys() - before.keys())):
            what = sorted(update.extras) or extra
            raise MessageError(f"the server asks for private changes ({CLIP}), and also for {what[0]!r} without them")
        of = roles(self.local.model)
        # Buffers other than statistics are sent back as they were received.
        changed = {
            key: value
            for key, value in update.arrays.items()
            if key in self.local.optimizer.parameters or of[key] is Role.STATISTICS
        }
        parts = parts_of(changed, of, frozenset(Role) - frozen_roles(config))
        needed = {key for part, some in parts.items() if some for key in KEYS[part][: 2 if NOISE in config else 1]}
        if missing := sorted(needed - config.keys()):
            raise MessageError(
                f"the server asks for private changes ({CLIP}), and for some of them without {missing[0]!r}"
            )
        change = change_of(parts, before, update.arrays)
        for part, (clip, noise) in KEYS.items():
            norm = float(config.get(clip, 0.0))
            change[part] = clipped(change[part], norm)
            if NOISE in config:
                deviation = float(config.get(noise, 0.0)) * norm
                change[part] = change[part] + gaussian(change[part].size, deviation, self._seed(part))
        if NOISE in config:
            update.metrics.pop(protocol.TRAIN_LOSS, None)
            update.metrics[protocol.NUM_EXAMPLES] = 1
        after = applied(parts, change, before)
        update.arrays = {key: after.get(key, before[key]) for key in update.arrays}

    def _seed(self, part: str) -> int | None:
        config = self.local.config
        if NOISE_SEED not in config:
            return None
        if self.local.partition is None:
            raise MessageError(
                f"the noise depends on a seed ({NOISE_SEED}) and the partition, and this client has none"
            )
        where = int(config.get(protocol.ROUND, 1)), self.local.partition
        return seeding.seed_for(int(config[NOISE_SEED]), f"private-{part}", *where)
