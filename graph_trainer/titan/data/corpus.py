"""Documents to train on: the standard library's source, or the user's own text."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError

DATASETS = {
    "stdlib": "the running Python's standard library, source files as documents (no path)",
    "text": "your own .txt or .jsonl file, or a folder of them, at dataset_path",
}

# Tests, generated tables, and packages that some Python builds leave out: without them the corpus
# is mostly prose-like source, and nearly the same on every machine that has the same Python.
_SKIPPED_IN_STDLIB = (
    "__pycache__|site-packages|dist-packages|tests?|idle_test|encodings|pydoc_data|idlelib|lib2to3"
    "|distutils|ensurepip|turtledemo|_sysconfigdata.*|config-.*"
)


VALIDATING_PERCENT = 8
"""How many of 100 documents validate, about."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each in the training or the validation split.

    A ``.py`` or ``.txt`` file of a folder is one document, and its path decides its split. A
    ``.jsonl`` record is one document, and its text decides its split, so that equal records are in
    the same split. So does the text of each piece of a lone ``.txt`` file, which is cut at blank
    lines into pieces of at least 4096 characters, each a document. Documents of nothing but
    whitespace are left out. About 8 of 100 documents validate; of two or more documents that
    differ, each split gets at least one, and a single document trains.
    """

    name: str
    root: Path  # the file itself, or the folder that the paths of files start from
    files: tuple[Path, ...]  # in the order of the documents

    def identity(self) -> tuple[Any, ...]:
        """Return what changes with the way of reading and with the size or times of any file."""
        stats = [(str(file.absolute()), file.stat()) for file in self.files if file.exists()]
        files = [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]
        return self.name, str(self.root.absolute()), files

    def documents(self) -> Iterator[tuple[str, bool]]:
        """Read the documents, one at a time: the text, and whether it validates.

        Raises:
            ConfigError: a file cannot be read, is not UTF-8, or a line of a .jsonl file is not
                an object with a "text" string.
        """
        hashes = []
        for key, _ in self.read():
            digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8)
            hashes.append(int.from_bytes(digest.digest(), "big"))
        # The smallest hash validates and the largest trains, whatever their values.
        threshold = min(max(2**64 * VALIDATING_PERCENT // 100, min(hashes) + 1), max(hashes))
        for value, (_, text) in zip(hashes, self.read(), strict=True):
            yield text, value < threshold

    def read(self) -> Iterator[tuple[str, str]]:
        """Read what decides the split of each document, and its text."""
        for file in self.files:
            is_jsonl = file.suffix == ".jsonl"
            try:
                with open(file, encoding="utf-8", newline="\n" if is_jsonl else "") as lines:
                    if is_jsonl:
                        texts = _records(file, lines)
                    else:
                        texts = _chunks(lines) if file == self.root else iter([lines.read()])
                    path = None if is_jsonl or file == self.root else file.relative_to(self.root)
                    for text in filter(str.strip, texts):
                        yield (path.as_posix() if path else text), text
            except (OSError, UnicodeDecodeError) as error:
                # Python may read its own sources in another encoding; a user's text must not be
                # left out without a message.
                if self.name == "stdlib" and isinstance(error, UnicodeDecodeError):
                    continue
                remedy = "Convert it (iconv -f <encoding> -t utf-8)"
                if isinstance(error, OSError):
                    remedy = "Correct its permissions"
                raise ConfigError(
                    f"{file} cannot be read as UTF-8 text: {error}. {remedy}, or take it out of "
                    "the dataset."
                ) from error


class Record(BaseModel):
    """A line of a .jsonl file; its other keys are ignored."""

    text: str


def _records(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield Record.model_validate_json(line).text
        except ValidationError as error:
            problem = error.errors()[0]
            where = "".join(f'"{key}": ' for key in problem["loc"])
            what = problem["msg"].replace(" at line 1 column", " at column")
            raise ConfigError(
                f"{file}, line {number}: {where}{what}, found {repr(problem['input'])[:80]}. A "
                '.jsonl dataset has one {"text": "..."} object a line: correct or remove the line.'
            ) from error


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    chunk: list[str] = []
    size = 0
    for line in lines:
        # Cut where text begins after a blank line.
        if size >= 4096 and line.strip() and not chunk[-1].strip():
            yield "".join(chunk)
            chunk, size = [], 0
        chunk.append(line)
        size += len(line)
    yield "".join(chunk)


def open_corpus(name: str | None, path: str | None = None) -> Corpus:
    """List the files of a dataset, without reading more than the first document.

    Args:
        name: a key of DATASETS; None for "text" where there is a path, else "stdlib".
        path: for "text", a .txt or .jsonl file, or a folder with such files at any depth (hidden
            ones are passed over); None for "stdlib".

    Raises:
        ConfigError: an unknown name, a path that is missing, not wanted or of the wrong kind, a
            folder without .txt and .jsonl files, or files without a single document.
    """
    name = name or ("text" if path else "stdlib")
    suffixes: tuple[str, ...]
    if name == "stdlib":
        if path is not None:
            raise ConfigError(
                f"dataset_path = {path!r} is set, but dataset 'stdlib' takes no path. To train "
                "on the files at that path, set dataset = 'text'."
            )
        root, suffixes = Path(sysconfig.get_paths()["stdlib"]), (".py",)
        skipped = _SKIPPED_IN_STDLIB
    elif name == "text":
        if not path:
            raise ConfigError(
                "dataset 'text' needs dataset_path: a .txt or .jsonl file, or a folder of them."
            )
        root, suffixes, skipped = Path(path).expanduser(), (".txt", ".jsonl"), r"\..*"
        if not root.is_dir() and not (root.exists() and root.suffix in suffixes):
            problem = f"ends in {root.suffix!r}" if root.exists() else "does not exist"
            raise ConfigError(
                f"dataset_path {path!r} {problem} (looked at {root.absolute()}). Name a "
                '.txt or .jsonl file (one {"text": ...} a line), or a folder of them.'
            )
    else:
        hint = did_you_mean(name, DATASETS, " Did you mean '{}'?", cutoff=0.5)
        valid = "; ".join(f"{key!r}: {summary}" for key, summary in DATASETS.items())
        raise ConfigError(f"unknown dataset {name!r}.{hint} Datasets are {valid}.")
    files = [] if root.is_dir() else [root]
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [sub for sub in subfolders if not re.fullmatch(skipped, sub)]
        for file in names:
            if file.endswith(suffixes) and not re.fullmatch(skipped, file):
                files.append(Path(folder, file))
    # In an order that is the same everywhere.
    corpus = Corpus(name, root, tuple(sorted(files, key=Path.as_posix)))
    if not any(corpus.read()):
        raise ConfigError(
            f"dataset {name!r} has no documents: of {len(files)} {' and '.join(suffixes)} files at "
            f"{root} none has text in it. Set dataset_path to a file or a folder with text"
            + ("." if name == "text" else ", and dataset = 'text'.")
        )
    return corpus
