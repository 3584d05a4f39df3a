"""A hook of MkDocs: pages of files outside `docs`, the code of each strategy on its page, and numbers that don't wrap.

The files are the changelog, and `examples/README.md` with the notebooks, whose stored outputs are shown.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fedbn_flwr.extensions import declared

ROOT = Path(__file__).parents[1]
FILES = {  # by the name of the page
    **{file.stem: file for file in (ROOT / "strategies").glob("[!_]*.py")},
    **{
        where.split(".")[2]: ROOT / f"{where.split(':')[0].replace('.', '/')}.py"
        for where in declared("strategies").values()
    },
}


def title(name: str) -> str:
    """The heading of a strategy's page."""
    with (ROOT / "docs" / "strategies" / f"{name}.md").open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def in_the_code(file: Path) -> str:
    """What the file says of itself, such as choices that the paper leaves open, and the file to unfold."""
    source, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
    code = textwrap.indent(f"```python\n{source}```\n", "    ")
    return f'## In the code\n\n{ast.get_docstring(ast.parse(source))}\n\n??? quote "{name}"\n\n{code}'


def in_markdown(notebook: Path, pictures: dict[str, bytes]) -> Iterator[str]:
    """The cells of a notebook and their stored outputs; pictures are added by name."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        yield source.replace("](../docs/", "](../") if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            kinds = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in kinds:
                name = f"{notebook.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(kinds["image/png"]))
                yield f"![The picture that this cell draws]({name})"
            else:
                yield f"```text\n{''.join(kinds['text/plain'])}\n```"


def examples(config: MkDocsConfig) -> Iterator[File]:
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](")
    text = re.sub(r"\((\w+)\.ipynb\)", r"(notebooks/\1.md)", text)
    yield File.generated(config, "examples.md", content=text.replace("[output](brca.txt)", "output in `brca.txt`"))
    for notebook in folder.glob("*.ipynb"):
        pictures = dict[str, bytes]()
        content = "\n\n".join(in_markdown(notebook, pictures))
        yield File.generated(config, f"notebooks/{notebook.stem}.md", content=content)
        for name, picture in pictures.items():
            yield File.generated(config, f"notebooks/{name}", content=picture)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{title(name): f"strategies/{name}.md"} for name in sorted(FILES)]
    assert config.nav is not None
    (concepts,) = (entry["Concepts"] for entry in config.nav if "Concepts" in entry)
    (strategies,) = (entry["Strategies"] for entry in concepts if "Strategies" in entry)
    strategies += [page for page in pages if page not in strategies]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, code in FILES.items():
        page = ROOT / "docs" / "strategies" / f"{name}.md"
        content = f"{page.read_text(encoding='utf-8')}\n{in_the_code(code)}"
        if (written := files.get_file_from_path(f"strategies/{name}.md")) is not None:
            files.remove(written)
        files.append(File.generated(config, f"strategies/{name}.md", content=content))
    for file in examples(config):
        files.append(file)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    changes = changes.replace("[CONTRIBUTING](CONTRIBUTING.md#architecture)", "CONTRIBUTING")
    files.append(File.generated(config, "changelog.md", content=changes))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In tables, a number stays on a line with its deviation, an interval with its ends."""
    return re.sub(
        r"^\|.*",
        lambda row: re.sub(r"(?<=\d) (±|to) (?=-?\d)", "\u00a0\\1\u00a0", row[0]),
        markdown,
        flags=re.MULTILINE,
    )
