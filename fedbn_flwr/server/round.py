"""The way of a round: how the outermost rule of a chain makes the rounds of a run from the hooks of all.

Flower calls `start`, which calls `configure_train` and `aggregate_train` in each round. The innermost rule, a
`BaseStrategy`, chooses the clients, and judges their replies.
"""

from __future__ import annotations

import inspect
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import RoundSkipped, RunFailed, SettingsError, few, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply, with_content
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.norms.roles import NORM_STATE, Role

from .base import BaseStrategy
from .hooks import Hooks, Round
from .questions import ask
from .roster import Attendance

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# Flower's strategies for differential privacy, which wrap others.
NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))


class Rule(Hooks):
    """A strategy written as hooks, alone or around another one."""

    base: BaseStrategy  # the innermost rule of the chain, which chooses the clients
    _round: Round | None = None  # the current round
    _name: Mapping[str, str] = {}  # the name of the run, unless `start` started it

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages, by the hooks of the chain. Flower calls this on the outermost strategy."""
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do, or a `start` of the user.
            self._check_outer()
            self.begin(self.num_rounds, arrays)
            self._name = _drawn_name()
        # A rule that makes the statistics itself hides them from a strategy of Flower inside it.
        hidden = NORM_STATE if any("statistics" in rule.restores for rule in self.chain) else frozenset[Role]()
        round = Round(server_round, arrays, self._named(config), grid, hidden)
        for rule in self.chain:
            if (question := rule.question(round)) is not None:
                ask(self.base, round, question)
            round = replace(round, config=ConfigRecord({**round.config, **rule.config(round)}))
        self._round, before = round, {**round.config}
        messages: Sequence[Message] = self.base.train_messages(round)
        self.base.asked = self.base.asked_by(messages, arrays)
        # A strategy of Flower may change the config of all later rounds too, as in its tutorial: config["lr"] *= 0.5
        config.update({key: value for key, value in round.config.items() if before.get(key) != value})
        for rule in reversed(self.chain):
            messages = rule.outgoing(round, messages)
        messages = self.base.with_exchanges(round, messages)
        records = {name: pack(values) for rule in self.chain for name, values in rule.records(round).items() if values}
        if not records:
            return messages
        return [with_content(message, RecordDict({**message.content, **records})) for message in messages]

    def _check_outer(self) -> None:
        """Raise SettingsError if a strategy of Flower for privacy around this one would clip records of the rule."""
        outside = traceback.walk_stack(inspect.currentframe())  # no strategy knows the one around it
        for frame, _ in outside if self.traits.records else ():
            if isinstance(outer := frame.f_locals.get("self"), NOISED):
                kind = type(outer).__name__
                raise SettingsError(
                    f"{kind} clips each record of a reply as if it were the model, and {self} inside it also sends "
                    f"{self.traits.besides[0]}; use {self} without {kind}, or a strategy that sends only the model"
                )

    def _named(self, config: ConfigRecord, keys: Iterable[str] = ()) -> ConfigRecord:
        """The config with the name of the run, by which clients know their state of it, and with these keys."""
        name = {} if protocol.RUN in config else self._name
        added: dict[str, str | bool] = {**name, **dict.fromkeys(keys, True)}
        return ConfigRecord({**added, **config}) if added.keys() - config.keys() else config

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model, by the hooks of the chain. Flower calls this on the outermost strategy."""
        base, round = self.base, self._round
        base.training = Attendance()
        if round is None or not base.asked.nodes:
            return None, None
        try:
            usable = self._usable(round, gate(replies))
        except RoundSkipped:
            return round.arrays, MetricRecord({"skipped": 1})
        names = "(".join(map(str, self.chain)) + ")" * (len(self.chain) - 1)
        given = self.weights(round, usable)
        if len(given) != len(usable):
            raise RunFailed(f"{names}.weights returned {len(given)} for {len(usable)} replies; expected one for each")
        weights = base.bound_weights(f"round {server_round}", given)
        combined = self.combine(round, usable, weights)
        if not isinstance(combined, Mapping):
            raise RunFailed(f"{names}.combine returned {shown(combined)}; expected the new model, a dict of arrays")
        if problem := base.model_problem(combined, unpack(round.arrays)):
            raise RunFailed(f"round {server_round}: {names} made a model that cannot be used: {problem}")
        model = pack(combined)
        if list(model) != list(round.arrays):  # arrays that clients do not send back do not change
            if missing := [key for key in usable[0].arrays if key not in model]:
                log_once(f"{names}.combine doesn't return {few(missing, 3)}: what was sent stays")
            model = record_of({**round.arrays, **model})
        for rule in reversed(self.chain):
            rule.after_round(round, usable, weights)
        return model, base.metrics(usable)

    def _usable(self, round: Round, messages: Sequence[Message]) -> Sequence[Reply]:
        """The replies that every rule of the chain can use."""
        for rule in self.chain:
            messages = rule.incoming(round, messages)
        replies = self.base.usable_replies(self.chain, round, messages)
        for rule in reversed(self.chain):
            replies = rule.accepted(round, replies)
        return replies

    # --- the run ---

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the federation by Flower's `start`, or by that of a wrapped strategy, which may be the user's own."""
        self.base.reply_timeout = timeout
        self.begin(num_rounds, initial_arrays)
        train, evaluate, evaluate_model = self._run_arguments(grid, train_config, evaluate_config, evaluate_fn)
        try:
            return self._start()(
                grid=grid,
                initial_arrays=initial_arrays,
                num_rounds=num_rounds,
                timeout=timeout,
                train_config=train,
                evaluate_config=evaluate,
                evaluate_fn=evaluate_model,
            )
        finally:
            self.base.end()

    def _start(self) -> Callable[..., Result]:
        return super().start

    def _run_arguments(
        self, grid: Grid, train: ConfigRecord | None, evaluate: ConfigRecord | None, evaluate_fn: EvaluateFn | None
    ) -> tuple[ConfigRecord, ConfigRecord, EvaluateFn | None]:
        """Configs that name the run, by which clients tell it from others, and `evaluate_fn` of `global_model`."""
        given = {**(train or {})}
        name = protocol.run_keys(given) if protocol.RUN in given else _drawn_name()
        train, evaluate = ConfigRecord({**given, **name}), ConfigRecord({**(evaluate or {}), **name})

        def evaluate_model(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(number, self.global_model(evaluation_round(self, number, arrays, train, grid)))

        return train, evaluate, evaluate_fn and evaluate_model

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Refuse to run under a server of Flower's old API, which calls this first."""
        raise SettingsError(
            f"{self} is not a strategy of Flower's old API, of which ServerApp(server_fn=...) starts a "
            "server; call start() in a function under @app.main() (docs/old-api.md)"
        )


def evaluation_round(rule: Rule, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Round:
    """The round in which this model is tested; its config selects the rules that change each client's inputs."""
    return Round(number, arrays, rule._named(config, rule.traits.own_inputs), grid)


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}


def state_of(rule: Rule) -> bytes:
    """The state of a rule and of those inside it; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._state()} for each in rule.chain])


def restore(rule: Rule, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, saved in zip(rule.chain, parse(state, list), strict=True):
        each._load_state(saved[str(each)])
