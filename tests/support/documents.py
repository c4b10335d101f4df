"""The project's documents as the tests read them: pages, their sections, and the blocks in these."""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.md")
    if not any(part[0] == "." or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
)


@dataclasses.dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
        page: the document, relative to the project's root.
        section: the heading of level 2 above it; "" before the first one.
        language: as the fence names it.
        text: with the last line's end.
    """

    page: pathlib.Path
    section: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Tell it from the other blocks, in a test's name."""
        return f"{self.page}: {self.section}"


def read(page: pathlib.Path) -> str:
    """Return the text of a document."""
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: pathlib.Path) -> str:
    """Return a document without its blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


def blocks(language: str = r"\w*") -> list[Block]:
    """Return all blocks of a language, in the order of the documents."""
    found = []
    for page in PAGES:
        for text in f"\n\n{read(page)}".split("\n## "):
            section = text.partition("\n")[0]
            pattern = rf"^```({language})\n(.*?)^```$"
            for match in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
                found.append(Block(page, section, match[1], match[2]))
    return found


def anchors(page: pathlib.Path) -> set[str]:
    """Return what a link to a heading of a document may name, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {word.strip().replace(" ", "-") for word in words}
