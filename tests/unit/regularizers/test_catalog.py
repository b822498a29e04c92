"""The table of regularizers and `parse`."""

from __future__ import annotations

import pytest

import hookdrop
from hookdrop import (
    Dropout,
    parse,
)
from hookdrop.regularizers import REGULARIZERS


class TestParse:
    def test_reads_literal_settings(self) -> None:
        made = parse(" DropBlock(0.2, block_size=(3, 5), per_channel=False, normalize=None) ")
        assert repr(made) == "DropBlock(p=0.2, block_size=(3, 5), per_channel=False, normalize=None)"

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('true')",
            "DropBlock(p=__import__('os').getpid())",
            "DropBlock(p=1-0.9 if True else 0)",
            "DropBlock(**{'p': 0.1})",
            "DropBlock(p=0.1); print(1)",
            "(lambda: DropBlock(0.1))()",
            "hookdrop.DropBlock(p=0.1)",
            "DropBlock(p=[x for x in (1,)])",
            "DropBlock(p=0.1",
            "",
            "0.1",
            "\x00",
            "Dropout(p=" + "-" * 5000 + "1)",
        ],
    )
    def test_never_runs_code(self, text: str) -> None:
        with pytest.raises(ValueError, match="parse: "):
            parse(text)

    def test_unknown_name_suggests_similar_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'Dropblok' is not a hookdrop regularizer(.|\n)*did you mean: DropBlock"):
            parse("Dropblok(p=0.1)")

    def test_bare_name_error_lists_the_settings(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"has no arguments: write 'DropPath\(...\)'.\n  signature: DropPath\(p=None, mode='row', \*, scale=True, samples=None, keep_prob=None\)$",
        ):
            parse("DropPath")

    def test_duplicate_setting_raises(self) -> None:
        with pytest.raises(ValueError, match="cannot parse"):
            parse("DropBlock(p=0.1, p=0.2)")

    def test_unknown_setting_error_lists_the_known_ones(self) -> None:
        with pytest.raises(TypeError, match=r"blocksize(.|\n)*signature: DropBlock\(p"):
            parse("DropBlock(p=0.1, blocksize=7)")

    def test_invalid_rate_raises_the_error_of_the_class(self) -> None:
        with pytest.raises(ValueError, match="p must lie in"):
            parse("DropBlock(p=7)")

    def test_non_string_raises(self) -> None:
        with pytest.raises(TypeError, match="must be a str"):
            parse(Dropout(0.1))


def test_every_regularizer_cites_its_paper() -> None:
    for name, cls in REGULARIZERS.items():
        text = "".join(base.__doc__ or "" for base in cls.__mro__ if base.__module__.startswith("hookdrop.regul"))
        assert "arXiv" in text or "Srivastava" in text or "Bishop" in text, name


def test_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(hookdrop, name) for name in hookdrop.__all__)
    assert sorted(hookdrop.__all__) == hookdrop.__all__
    assert set(REGULARIZERS) <= set(hookdrop.__all__)
