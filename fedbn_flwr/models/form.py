"""The form that a model's arrays must have: keys, shapes, and one value for each tensor that has several keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.norms.roles import Role


class ModelForm:
    """The roles and shapes of a model's tensors, and which keys name the same tensor."""

    def __init__(self, roles: Mapping[str, Role], tensors: Mapping[str, Tensor]) -> None:
        self._roles = roles
        self._shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        tied: dict[int, list[str]] = {}
        for key, value in tensors.items():
            tied.setdefault(id(value), []).append(key)
        self._tied = [keys for keys in tied.values() if len(keys) > 1]

    def kept_problem(self, kept: Collection[str], arrays: Collection[str] = ()) -> str | None:
        """Why these keys cannot stay on the client, or None: they were received, or are some of a tensor's keys."""
        if sent := [key for key in arrays if key in kept]:
            return (
                f"the server sent {sent[0]!r}, which stays on the client ({len(kept)} arrays do). Server and clients "
                "must build the same model, whose batch norms all track statistics, or none does"
            )
        for keys in self._tied:
            inside, outside = ([key for key in keys if (key in kept) is stays] for stays in (True, False))
            if inside and outside:
                return (
                    f"{inside[0]!r} stays on the client and {outside[0]!r} does not, and they are one tensor in this "
                    "model; keep both or none"
                )
        return None

    def check(self, arrays: Arrays, own: Arrays, lacking: Sequence[str]) -> None:
        """Raise MessageError unless the received arrays and the client's own ones fit; `lacking` are missing keys."""
        if unknown := [key for key in arrays if key not in self._roles]:
            raise MessageError(
                f"the server sent {unknown[0]!r}, which this client's model does not have; its first keys are "
                f"{list(self._roles)[:3]}. Server and clients must build the same model"
            )
        # Standalone sends no arrays at all. A message that lacks only some is for another model.
        if arrays and lacking:
            kind = self._roles[lacking[0]]
            norms = ", whose batch norms all track statistics, or none does" if kind is not Role.WEIGHTS else ""
            raise MessageError(
                f"the server did not send {lacking[0]!r} ({len(lacking)} keys of {kind} are missing), and the "
                f"client's state does not have it. Server and clients must build the same model{norms}"
            )
        for keys in self._tied:
            first, *others = [key for key in keys if key in arrays] or keys[:1]
            if different := [key for key in others if not np.array_equal(arrays[key], arrays[first])]:
                raise MessageError(
                    f"the server sent different values for {first!r} and {different[0]!r}, which are one tensor in "
                    "this model (Private adds noise to each); untie them"
                )
        for where, given in (("the message", arrays), ("the client's state", own)):
            if wrong := [key for key in given if given[key].shape != self._shapes[key]]:
                raise MessageError(
                    f"{wrong[0]!r} has shape {given[wrong[0]].shape} in {where} and {self._shapes[wrong[0]]} in this "
                    "client's model"
                )
