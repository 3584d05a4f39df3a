"""The exchange service's settings in the ServerApp's environment."""

from __future__ import annotations

import contextlib
from dataclasses import fields

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.extensions.streams.config import PREFIX, ExchangeConfig
from fedbn_flwr.strategies import FedTAN
from tests.support.command import ROOT
from tests.support.fuzz import cases


def prepared(environment: dict[str, str]) -> None:
    if (config := ExchangeConfig.from_environment(environment)) is not None:
        config.prepare()


def test_without_an_address_there_is_no_service() -> None:
    assert ExchangeConfig.from_environment({"FEDBN_OUT": "/runs"}) is None
    assert ExchangeConfig.from_environment({"FEDBN_EXCHANGE_ADDRESS": ""}) is None
    found = ExchangeConfig.from_environment({"FEDBN_EXCHANGE_ADDRESS": "example.org:8001"})
    assert found is not None
    assert found.listens_on == "0.0.0.0:8001"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ADDRESS": "example.org"}, r"ADDRESS is 'example\.org'; expected HOST:PORT"),
        ({"ADDRESS": "example.org:70000"}, "expected HOST:PORT"),
        ({"ADDRESS": "example.org:8001"}, "there is no certificate"),
        ({"ADDRESS": "127.0.0.1:8001", "LISTEN": "0.0.0.0:8001"}, "not on this machine"),
        ({"ADDRESS": "localhost:1", "KEY": "/key"}, "must both be set; only one is"),
        ({"ADDRESS": "localhost:1", "CA": "/not/there"}, "CA is '/not/there', which cannot be read"),
        ({"ADDRESS": "localhost:1", "CA": str(ROOT / "LICENSE")}, "LICENSE', which is not a PEM file"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        prepared({f"FEDBN_EXCHANGE_{key}": value for key, value in given.items()})


def test_an_experiment_cannot_name_an_address() -> None:
    with pytest.raises(SettingsError, match=r"direct is '10\.0\.0\.1:8001'; expected true or false"):
        FedTAN(direct="10.0.0.1:8001")  # type: ignore[arg-type]


def test_the_variables_of_the_deployment_exist() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    settings = {key for key in services["superexec-serverapp"]["environment"] if "EXCHANGE" in key}
    assert "FEDBN_EXCHANGE_ADDRESS" in settings <= {f"{PREFIX}{field.name.upper()}" for field in fields(ExchangeConfig)}


paths = st.sampled_from(["/dev/null", "/", "missing.pem", str(ROOT / "pyproject.toml"), "x" * 5000])
addresses = st.sampled_from(
    ["localhost:1", "0.0.0.0:80", ":", "a:b", "[::1]:9", "127.0.0.1:" + "1" * 5000, "host:٣", ""]
)
values = addresses | paths | st.sampled_from(["1", "0", "yes", "TRUE"]) | st.text(max_size=6)
names = st.sampled_from(["ADDRESS", "LISTEN", "CERTIFICATE", "KEY", "CA", "ADRESS"])


@settings(max_examples=cases(150))
@given(st.dictionaries(names.map(PREFIX.__add__), values.filter(lambda value: "\0" not in value), max_size=5))
def test_any_environment_of_the_exchange(environment: dict[str, str]) -> None:
    with contextlib.suppress(SettingsError):
        prepared(environment)
