"""What the site has beyond docs/: the README as its front page, and a page for each file that others link to."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FRONT = "index.md"
# In Markdown, and in the little HTML that there is.
LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=["'])([^)"'#\s]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, and a page for every linked file outside docs/."""
    files.append(File.generated(config, FRONT, abs_src_path=str(ROOT / "README.md")))
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, link in LINK.findall(page.read_text(encoding="utf-8")):
            target = Path(os.path.normpath(page.parent / link))
            if target in seen or not target.is_file() or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            files.append(File.generated(config, _address(target), content=_shown(target)))
            waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = Path(page.file.src_uri)
    source = _source(here)
    if source.suffix != ".md":
        return markdown

    def moved(link: re.Match) -> str:
        target = Path(os.path.normpath(source.parent / link[2]))
        if "://" in link[2] or not target.is_relative_to(ROOT):
            return link[0]
        return link[1] + Path(os.path.relpath(_address(target), here.parent)).as_posix()

    return LINK.sub(moved, markdown)


def _address(file: Path) -> str:
    """Return the site's source path of a file of the repository."""
    if file == ROOT / "README.md":
        return FRONT
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    place = f"files/{file.relative_to(ROOT).as_posix()}"
    return place if file.suffix == ".md" else f"{place}.md"


def _source(page: Path) -> Path:
    """Undo `_address`."""
    if page.as_posix() == FRONT:
        return ROOT / "README.md"
    if page.parts[0] != "files":
        return DOCS / page
    file = ROOT / page.relative_to("files")
    return file if file.is_file() else file.with_suffix("")


def _shown(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}.get(file.suffix, "text")
    return f"# {file.relative_to(ROOT).as_posix()}\n\n````{language}\n{text}````\n"
