"""The repository's address is filled in once; every other place follows from it."""

from __future__ import annotations

import tomllib

import address
import pytest
import yaml

from tests.support.command import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
URL = "https://github.com/Some-Lab/fedbn-flwr"
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in address.FILES}
FILLED = {name: address.renewed(text, URL, VERSION) for name, text in TEXTS.items()}


def test_the_address_is_that_of_the_projects_urls() -> None:
    assert address.address(f'[project]\nname = "x"\n[project.urls]\nRepository = "{URL}/"\n') == URL
    assert address.address('[project]\nname = "x"\n') is None


@pytest.mark.parametrize("name", address.FILES)
def test_every_file_has_a_block_that_follows_the_address(name: str) -> None:
    assert URL not in TEXTS[name]
    assert URL in FILLED[name]
    assert address.renewed(FILLED[name], URL, VERSION) == FILLED[name]  # a second time changes nothing
    assert address.renewed(FILLED[name], None, VERSION) == TEXTS[name]


def test_the_filled_files_are_what_their_readers_expect() -> None:
    urls = tomllib.loads(FILLED["pyproject.toml"])["project"]["urls"]
    assert urls["Documentation"] == "https://some-lab.github.io/fedbn-flwr/"
    assert urls["Changelog"] == f"{URL}/blob/main/CHANGELOG.md"
    citation = yaml.safe_load(FILLED["CITATION.cff"])
    assert (citation["repository-code"], citation["url"]) == (URL, urls["Documentation"])
    assert citation["version"] == VERSION
    assert yaml.safe_load(FILLED["mkdocs.yml"])["site_url"] == urls["Documentation"]
    assert f"git clone {URL} && cd fedbn-flwr" in FILLED["CONTRIBUTING.md"]
    assert f"[Report a vulnerability]({URL}/security/advisories/new)" in FILLED["SECURITY.md"]
