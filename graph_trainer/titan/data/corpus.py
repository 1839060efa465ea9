"""Documents to train on: the standard library's source, or the user's own text."""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from graph_trainer.core.suggest import nearest
from graph_trainer.errors import ConfigError

Split = Literal["train", "validation"]

DATASETS = {
    "stdlib": "the running Python's standard library, source files as documents (no path)",
    "text": "your own .txt or .jsonl file, or a folder of them, at dataset_path",
}
"""Dataset names and what they are."""

VALIDATION_PERCENT = 8
"""Of the documents, about this many in a hundred validate; the others train."""

CHUNK_CHARACTERS = 4096
"""A lone .txt file is cut at blank lines into documents of at least this size."""

RULES_VERSION = 1
"""Part of the content hash: raise it when the same files give other documents."""

# Tests, generated tables, and packages that some Python builds leave out: without them the corpus
# is mostly prose-like source, and nearly the same on every machine that has the same Python.
_SKIPPED_FOLDERS = (
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
    | {"idlelib", "lib2to3", "distutils", "ensurepip", "turtledemo"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each in the training or the validation split.

    A ``.py`` or ``.txt`` file is one document, and its path decides its split. A ``.jsonl`` record
    is one document, and its text decides its split, so that equal records are in the same split.
    So does the text of each piece of a lone ``.txt`` file, which is cut at blank lines into
    documents of at least CHUNK_CHARACTERS characters; the pieces concatenated are the file.
    Documents of nothing but whitespace are left out. About VALIDATION_PERCENT of the documents
    validate; of two or more documents that differ, each split gets at least one, and a single
    document trains.
    """

    name: str
    """The dataset's name, as in DATASETS."""

    root: Path
    """The file itself, or the folder that the paths of ``files`` start from."""

    files: tuple[Path, ...]
    """Every file, in the order of the documents."""

    @cached_property
    def content_hash(self) -> str:
        """Hexadecimal digits that change with the path or the bytes of any file."""
        from datasets.fingerprint import Hasher

        hasher = Hasher()
        hasher.update((RULES_VERSION, self.name))
        for file in self.files:
            # The name of a lone file does not matter. Its suffix does, and that it is alone: both
            # decide how the file is cut into documents.
            path = f"*{file.suffix}" if file == self.root else self._relative(file)
            with _naming(file):
                hasher.update((path, file.read_bytes()))
        return hasher.hexdigest()

    @cached_property
    def validation(self) -> tuple[bool, ...]:
        """For each document, in order: is it in the validation split?"""
        hashes = [_stable_hash(key) for key, _ in self._read()]
        different = sorted(set(hashes))
        if len(different) < 2:
            return (False,) * len(hashes)
        # The smallest hash validates and the largest trains, whatever their values.
        threshold = 2**64 * VALIDATION_PERCENT // 100
        threshold = min(max(threshold, different[0] + 1), different[-1])
        return tuple(value < threshold for value in hashes)

    def documents(self, split: Split | None = None) -> Iterator[str]:
        """Read the text of the documents, in order, one at a time.

        Args:
            split: only the documents of this split; None for all.

        Raises:
            ConfigError: a file cannot be read, is not UTF-8, or a line of a .jsonl file is not
                an object with a "text" string.
        """
        texts = (text for _, text in self._read())
        if split is None:
            return texts
        return itertools.compress(texts, (v == (split == "validation") for v in self.validation))

    def _relative(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _read(self) -> Iterator[tuple[str, str]]:
        """Generate what decides the split of each document, and its text."""
        for file in self.files:
            documents: Iterator[tuple[str, str]]
            with _naming(file, skip_other_encodings=self.name == "stdlib"):
                if file.suffix == ".jsonl":
                    documents = ((text, text) for text in _read_jsonl(file))
                elif file == self.root:
                    documents = ((text, text) for text in _read_chunks(file))
                else:
                    text = file.read_bytes().decode("utf-8")
                    documents = iter([(self._relative(file), text)])
                yield from (document for document in documents if document[1].strip())


def open_corpus(name: str, path: str | None = None) -> Corpus:
    """Open the corpus of a dataset name and, for "text", of a path.

    Lists files and reads at most the first document: a bad line further on is found when the
    corpus is tokenised.

    Args:
        name: a key of DATASETS.
        path: for "text", a .txt or .jsonl file or a folder with such files at
            any depth (hidden ones are passed over); None for "stdlib".

    Raises:
        ConfigError: an unknown name, a path that is missing, not wanted or of the wrong kind, a
            folder without .txt and .jsonl files, or files without a single document.
    """
    if name == "stdlib":
        if path is not None:
            raise ConfigError(
                f"dataset_path = {path!r} is set, but dataset 'stdlib' takes no path. To train "
                "on the files at that path, set dataset = 'text'."
            )
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _walk(root, (".py",), _SKIPPED_FOLDERS, _SKIPPED_PREFIXES)
        if not files:
            raise ConfigError(
                f"dataset 'stdlib' found no source files at {root}: this Python comes without "
                "them. Install a Python that has them, or set dataset = 'text' and dataset_path."
            )
    elif name == "text":
        if not path:
            raise ConfigError(
                "dataset 'text' needs dataset_path: a .txt or .jsonl file, or a folder of them."
            )
        root, files = _own_text(path)
    else:
        near = nearest(name, DATASETS, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        valid = "; ".join(f"{key!r}: {summary}" for key, summary in DATASETS.items())
        raise ConfigError(f"unknown dataset {name!r}.{hint} Datasets are {valid}.")
    corpus = Corpus(name, root, files)
    if next(corpus.documents(), None) is None:
        raise ConfigError(
            f"dataset {name!r} has no documents: each of the files at {root} is empty "
            f"({len(files)}). Name a file or folder with text in it."
        )
    return corpus


def _own_text(path: str) -> tuple[Path, tuple[Path, ...]]:
    """Return the root and the files of dataset "text"."""
    root = Path(path).expanduser()
    if not root.exists():
        siblings = root.parent.iterdir() if root.parent.is_dir() else iter([])
        near = nearest(root.name, [s.name for s in itertools.islice(siblings, 10_000)], count=1)
        hint = f" Did you mean {str(root.with_name(near[0]))!r}?" if near else ""
        raise ConfigError(
            f"dataset_path {path!r} does not exist (looked at {root.absolute()}).{hint} Name a "
            ".txt or .jsonl file, or a folder of them."
        )
    if root.is_dir():
        files = _walk(root, (".txt", ".jsonl"), skipped_prefixes=(".",))
        if not files:
            raise ConfigError(
                f"dataset_path {path!r} is a folder without a single .txt or .jsonl file, at any "
                "depth. Put text there, or name another path."
            )
        return root, files
    if root.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"dataset_path {path!r} ends in {root.suffix!r}; a dataset is a .txt file, a .jsonl "
            'file (one {"text": ...} a line), or a folder of them. Rename or convert it.'
        )
    return root, (root,)


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    skipped: Collection[str] = (),
    skipped_prefixes: tuple[str, ...] = (),
) -> tuple[Path, ...]:
    """List files below ``root`` by suffix and name, in an order that is the same everywhere."""

    def wanted(name: str) -> bool:
        return name not in skipped and not name.startswith(skipped_prefixes)

    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = filter(wanted, subfolders)
        paths += [Path(folder, name) for name in filter(wanted, names) if name.endswith(suffixes)]
    return tuple(sorted(paths, key=lambda file: file.relative_to(root).as_posix()))


@contextmanager
def _naming(file: Path, skip_other_encodings: bool = False) -> Iterator[None]:
    """Turn errors of reading a file into ConfigErrors that name the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        # Python may read its own sources in another encoding; a user's text must not be left
        # out without a message.
        if not skip_other_encodings:
            raise ConfigError(
                f"{file} is not UTF-8 text ({error}). Convert it (iconv -f <encoding> -t utf-8), "
                "or move it out of the dataset."
            ) from error
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Correct its permissions or take it out of the "
            "dataset."
        ) from error


class _Record(BaseModel):
    """A line of a .jsonl file; its other keys are ignored."""

    text: str


def _read_jsonl(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _Record.model_validate_json(line).text
            except ValidationError as error:
                problem = error.errors()[0]
                where = "".join(f'"{key}": ' for key in problem["loc"])
                what = problem["msg"].replace(" at line 1 column", " at column")
                raise ConfigError(
                    f"{file}, line {number}: {where}{what}, found {repr(problem['input'])[:80]}. "
                    'A .jsonl dataset has one {"text": "..."} object a line: correct or remove '
                    "the line."
                ) from error


def _read_chunks(file: Path) -> Iterator[str]:
    chunk: list[str] = []
    size = 0
    after_blank = False
    with open(file, encoding="utf-8", newline="") as lines:
        for line in lines:
            blank = not line.strip()
            if after_blank and not blank and size >= CHUNK_CHARACTERS:
                yield "".join(chunk)
                chunk, size = [], 0
            chunk.append(line)
            size += len(line)
            after_blank = blank
    yield "".join(chunk)


def _stable_hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
