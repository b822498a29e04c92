"""English text that every machine has: the docstrings of installed packages, read from their sources at run time."""

import ast
import hashlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

HOME, OTHER = ("scikit-learn", "sklearn", "1.9.1"), ("matplotlib", "matplotlib", "3.11.2")
"""Trained on, and the other domain: distribution, package, version."""
WINDOW = 13  # words; a paragraph that shares as many in a row with an earlier one is a near-duplicate
VOCABULARY = 1_000
END = "<end>"  # after each paragraph
_WORD = re.compile(r"\w+|[^\w\s]")
SIZES = {"train": 25_000, "validation": 8_000, "same package": 15_000, "other package": 15_000}
"""The number of words of each split."""


@dataclass(frozen=True)
class Corpus:
    """The paragraphs of each split as tokens; a paragraph ends with the token `END`, whose number is 0."""

    tokens: dict[str, list[Tensor]]
    words: dict[str, int]  # of each split
    removed: dict[str, float]  # the fraction of the words of each split that belonged to near-duplicates
    sha256: str  # of all text and of the vocabulary


def load() -> Corpus:
    """Read both packages. Whole modules belong to one split, chosen by the hash of their names, so by no seed."""
    splits: dict[str, list[str]] = {name: [] for name in SIZES}
    for module, text in _paragraphs(*HOME):
        part = int(hashlib.sha256(module.encode()).hexdigest(), 16) % 10
        splits["validation" if part == 0 else "same package" if part == 1 else "train"].append(text)
    splits["other package"] = [text for _, text in _paragraphs(*OTHER)]
    seen: set[tuple[str, ...]] = set()
    removed, kept = {}, {}
    for name, texts in splits.items():
        unique = [text for text in texts if _is_new(text, seen)]
        removed[name] = 1 - _count(unique) / _count(texts)
        kept[name] = _first(unique, SIZES[name])
    tokenizer = _tokenizer(kept["train"])
    hashed = "\0".join([tokenizer.to_str(), *(text for texts in kept.values() for text in texts)])
    tokens = {name: [torch.tensor([*tokenizer.encode(t).ids, 0]) for t in texts] for name, texts in kept.items()}
    sha256 = hashlib.sha256(hashed.encode()).hexdigest()
    return Corpus(tokens, {name: _count(texts) for name, texts in kept.items()}, removed, sha256)


def _paragraphs(distribution: str, package: str, pinned: str) -> Iterator[tuple[str, str]]:
    """The paragraphs of all docstrings without code, each with the name of its module."""
    if version(distribution) != pinned:
        raise SystemExit(
            f"language.py: the study reads {distribution} {pinned}, and {version(distribution)} is installed.\n"
            f"  install it: pip install {distribution}=={pinned}\nNothing was trained."
        )
    root = Path(find_spec(package).origin).parent
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for text in re.split(r"\n\s*\n", inspect.cleandoc(ast.get_docstring(node) or "")):
                    words = _WORD.findall(text)
                    if ">>>" not in text and len(words) > 3:
                        yield str(path.relative_to(root)), " ".join(words).lower()


def _is_new(text: str, seen: set[tuple[str, ...]]) -> bool:
    words = text.split()
    windows = {tuple(words[i : i + WINDOW]) for i in range(max(1, len(words) - WINDOW + 1))}
    new = not windows & seen
    seen |= windows
    return new


def _count(texts: list[str]) -> int:
    return sum(len(text.split()) for text in texts)


def _first(texts: list[str], words: int) -> list[str]:
    before = accumulate((len(text.split()) for text in texts), initial=0)
    return [text for text, count in zip(texts, before, strict=False) if count < words]


def _tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-pair encoding, so that no word is unknown, learned from the training text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
