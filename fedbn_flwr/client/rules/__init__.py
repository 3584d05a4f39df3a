"""Client rules that are not yet in the files of their strategies."""

from fedbn_flwr.client.rule import ClientRule as ClientRule
from fedbn_flwr.client.rule import Key as Key
from fedbn_flwr.client.rule import LocalRound as LocalRound
from fedbn_flwr.client.rule import Update as Update
