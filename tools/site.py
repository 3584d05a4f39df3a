"""A hook of MkDocs that adds to each strategy's page the reference of its module, and the changelog to the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
MODULES = sorted(file for file in (ROOT / "strategies").glob("*.py") if not file.name.startswith("_"))


def title(module: Path) -> str:
    """The heading of a strategy's page."""
    with (ROOT / "docs" / "strategies" / f"{module.stem}.md").open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def directive(module: str) -> str:
    return f"::: {module}\n    options:\n      show_root_heading: false\n      heading_level: 3\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{title(module): f"strategies/{module.stem}.md"} for module in MODULES]
    assert config.nav is not None
    config.nav = [{"Strategies": pages} if "Strategies" in entry else entry for entry in config.nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for module in MODULES:
        page = ROOT / "docs" / "strategies" / f"{module.stem}.md"
        content = page.read_text(encoding="utf-8") + f"\n## Reference\n\n{directive(f'strategies.{module.stem}')}"
        if (written := files.get_file_from_path(f"strategies/{module.stem}.md")) is not None:
            files.remove(written)
        files.append(File.generated(config, f"strategies/{module.stem}.md", content=content))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(
        File.generated(config, "changelog.md", content=changes.replace("[README](README.md#architecture)", "README"))
    )
    return files
