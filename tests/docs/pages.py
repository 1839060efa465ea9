"""The pages of the documentation, their blocks and commands, and a reader's environment.

Every fenced block has a rule here, and one without a rule fails.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.launch import ROOT, user_environment

DRAWINGS = ("architecture.md",)
"""Pages whose `text` blocks are the output of nothing."""

CONTINUES = re.compile(r"continues the\s+block with `(\w+)`")
"""What the paragraph before a Python block says when an earlier one has to run first."""

NAMES_FILE = re.compile(r'"""((\w+/)?\w+\.py)"""')
"""The beginning of a Python block that is a file."""

STARTS_RANKS = ("torchrun", "./run_train.sh", "./run_tests.sh", "graph-trainer bisect-passes")
"""Commands for test_commands.py; other `graph-trainer` ones are run by test_pages.py."""


@dataclass
class Block:
    """One fenced block."""

    page: str
    """The page's name: "README.md", "training.md"."""
    kind: str
    line: int
    text: str = ""
    paragraph: str = ""
    """The text between this block and the one before."""
    output: list[str] = field(default_factory=list)
    """The lines of the `text` blocks that follow: what this one prints."""

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for text in lines if (line := re.sub(r"(^|\s)#.*", "", text).strip())]


def blocks_of(text: str, page: str) -> list[Block]:
    """Every fenced block; a `text` block is the output of the one before, or a drawing."""
    found: list[Block] = []
    paragraph: list[str] = []
    inside: Block | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("```"):
            if inside is None:
                paragraph.append(line)
            else:
                inside.text += line + "\n"
        elif inside is None:
            assert line.startswith("```"), f"line {number}: an indented fence"
            inside = Block(page, line[3:].strip(), number, paragraph="\n".join(paragraph))
            paragraph = []
        else:
            assert line == "```", f"line {number}: a fence inside a fence"
            found.append(inside)
            inside = None
    assert inside is None, f"line {inside and inside.line}: a fence that is not closed"
    runnable: Block | None = None
    for block in found:
        if block.kind == "text":
            assert block.text.strip(), f"line {block.line}: an empty output"
            if page not in DRAWINGS:
                assert runnable is not None, f"line {block.line}: output of no block"
                runnable.output += [line.rstrip() for line in block.text.splitlines()]
        else:
            assert block.kind in ("python", "bash", "toml"), (
                f"line {block.line}: no test knows what to do with a block of '{block.kind}'"
            )
            runnable = block
    for block in found:
        assert not (block.kind == "toml" and block.output), f"line {block.line}: TOML has no output"
    return [block for block in found if block.kind != "text"]


@dataclass
class Page:
    """One page: its blocks, its text without them, and the `code` in that text."""

    path: Path
    text: str
    blocks: list[Block]
    prose: str
    inline: list[str]


def without_blocks(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def _read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    prose = without_blocks(text)
    return Page(path, text, blocks_of(text, path.name), prose, re.findall(r"`([^`\n]+)`", prose))


INDEX = ROOT / "docs/README.md"
PAGES = {
    path.name: _read(path)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path != INDEX
}
BLOCKS = [block for page in PAGES.values() for block in page.blocks]
INLINE = [code for page in PAGES.values() for code in page.inline]


def commands(*, start_ranks: bool) -> list[tuple[Block, str]]:
    """Every command that does, or does not, start ranks, with a block it is in: one that shows an
    output, if there is one."""
    found: dict[str, Block] = {}
    for block in (b for b in BLOCKS if b.kind == "bash"):
        for command in block.commands:
            if command not in found or block.output:
                found[command] = block
    return [(block, c) for c, block in found.items() if starts_ranks(c) == start_ranks]


def starts_ranks(command: str) -> bool:
    """Whether a command of a bash block starts ranks; an AssertionError for an unknown one."""
    words = [w for w in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", w)]
    if words[0] in STARTS_RANKS or " ".join(words[:2]) in STARTS_RANKS:
        return True
    assert words[0] == "graph-trainer", f"no test knows how to run `{command}`"
    is_run = words[1] == "train" and not {"--help", "--dry-run"} & {*words}
    assert not is_run, f"`{command}`: write it with ./run_train.sh"
    return False


def environment() -> dict[str, str]:
    """A user's environment for the commands of the pages, whose output is 100 columns wide."""
    return user_environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="100")


def workplace(folder: Path) -> Path:
    """A folder like a checkout in which a reader has made what the pages speak of: their TOML files
    under their names, a pass, a folder of text and (empty) ones of a tokenizer and of lockfiles."""
    for block in BLOCKS:
        if block.kind == "toml":
            (folder / toml_name(block)).write_text(block.text)
    for script in ("run_train.sh", "run_tests.sh"):
        (folder / script).symlink_to(ROOT / script)
    (folder / "my_package").mkdir()
    (own,) = (b for b in PAGES["README.md"].blocks if "def keep_small_unshards" in b.text)
    definition = own.text[: own.text.index("config = ")]
    source = f"import graph_trainer as gt\n{definition}"
    (folder / "my_package/passes.py").write_text(source)
    for block in BLOCKS:
        if named := NAMES_FILE.match(block.text):
            (folder / named[1]).parent.mkdir(exist_ok=True)
            (folder / named[1]).write_text(block.text)
    (folder / "my_text").mkdir()
    (folder / "locks").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "LICENSE"):
        (folder / "my_text" / f"{name}.txt").write_text((ROOT / name).read_text(encoding="utf-8"))
    (folder / "assets/hf/Llama-3.1-8B").mkdir(parents=True)
    return folder


def toml_name(block: Block) -> str:
    """The file name in a TOML block's first line."""
    named = re.match(r"# (\S+\.toml)\n", block.text)
    assert named, f"line {block.line}: a TOML block begins with its file's name in a comment"
    return named[1]


def source_of(block: Block) -> tuple[str, list[str]]:
    """A Python block as a program with all that its paragraph says comes first, and the output."""
    said = CONTINUES.search(block.paragraph)
    if not said:
        return block.text, block.output
    here = PAGES[block.page].blocks
    before = here[: here.index(block)]
    (first,) = (b for b in before if b.kind == "python" and re.search(rf"\b{said[1]}\b", b.text))
    source, output = source_of(first)
    return f"{source}\n{block.text}", output + block.output
