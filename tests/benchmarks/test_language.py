"""The study of language models: no text is in two splits, scores count each token once, and the controls hold."""

import hashlib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import language_study
from language import arms, corpus, report, training
from language.arms import build


@pytest.mark.parametrize("arm", arms.ARMS, ids=lambda arm: f"{arm.model}: {arm.name}")
def test_every_arm_can_be_injected(arm: arms.Arm) -> None:
    value = (*arm.values, 0.4)[0]
    model = build(arm.model, value)
    sites = training.inject(arm, value, model, steps=10).sites
    assert {site.name for site in sites} or not arm.injections
    assert model(torch.zeros(2, 5, dtype=torch.long))[0].shape == (2, 5, corpus.VOCABULARY)


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SIZES", dict.fromkeys(corpus.SIZES, 600))
        for name, package in (("HOME", "networkx"), ("OTHER", "joblib")):
            patch.setattr(corpus, name, (package, package, version(package)))
        return corpus.load()


def test_no_window_of_words_is_in_two_paragraphs() -> None:
    kept = [f"{i} " + " ".join(map(str, range(i, i + 20))) for i in (0, 100, 104, 300)]
    seen: set[tuple[str, ...]] = set()
    assert [corpus._is_new(text, seen) for text in [*kept, "short", "short"]] == [True, True, False, True, True, False]


def test_splits_have_their_size_and_the_text_a_digest(text: corpus.Corpus) -> None:
    assert all(600 <= count < 1000 for count in text.words.values())
    assert len(bytes.fromhex(text.sha256)) == hashlib.sha256().digest_size


def test_score_is_the_loss_of_each_token_by_paragraph(text: corpus.Corpus) -> None:
    """A model without a state, whose windows cannot matter."""

    class Bigrams(torch.nn.Embedding):
        def forward(self, x_BT: torch.Tensor, state: object = None) -> tuple[torch.Tensor, object]:  # type: ignore[override]
            return super().forward(x_BT), None

    model, paragraphs = Bigrams(corpus.VOCABULARY, corpus.VOCABULARY), text.tokens["validation"]
    sums_P2 = training.score(model, paragraphs)
    stream = torch.cat(paragraphs)
    rows = stream[: len(stream) // training.BATCH * training.BATCH].view(training.BATCH, -1)
    logits = model(rows[:, :-1])[0].flatten(0, 1)
    every = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
    assert sums_P2[:, 1].sum() == rows[:, 1:].numel()
    torch.testing.assert_close(sums_P2[:, 0].sum(), every.double())


def test_study_trains_reports_resumes(text: corpus.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some arms and the controls, with two epochs; the p = 0 controls are bit-identical."""
    names = (arms.NONE, "LockedDropout", "AR + TAR", "residual_dropout")
    chosen = [replace(arm, values=arm.values[:1]) for arm in arms.ARMS if arm.name in names]
    monkeypatch.setattr(language_study, "ARMS", chosen)
    for name, settings in arms.MODELS.items():
        quick = {"epochs": 2, "weight_decay": [0.1], "weight_decay_none": [0.1]}
        quick["contrasts"] = [["AR + TAR", "LockedDropout"]] if name == "lstm" else []
        monkeypatch.setitem(arms.MODELS, name, settings | quick)
    monkeypatch.setattr(language_study, "SEEDS", range(2))
    study = language_study.Study(text, tmp_path, workers=1)
    spent, tuned = study.costs(rounds=2), study.tune()
    assert all(
        costs[arms.NONE]["flops"] == 1 and min(one["low"] for one in costs.values()) > 0 for costs in spent.values()
    )
    records = study.final(tuned)
    assert report.write(records, tuned, spent, tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("AR + TAR − LockedDropout") == 2, "on both test sets"
    assert page.count("bit-identical to none in 2 of 2 seeds") == 2
    assert not any(part in page for part in ("http://", "https://", "<script"))
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    monkeypatch.setattr(language_study, "_execute", None)
    assert study.final(tuned) == records, "the runs are read again"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before
