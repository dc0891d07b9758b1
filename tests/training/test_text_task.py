"""Text training: equal to SentenceTransformerTrainer's, texts cut by role, batches of an epoch, start.json's pairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from transformers import TrainerCallback

from mmclip.config import TextTrainConfig
from mmclip.data.beir import BeirCollection
from mmclip.data.text_pairs import open_pairs
from mmclip.losses.sentence_transformers import RoleRankingLoss
from mmclip.models.text_encoder import TextEncoder, load_text_model
from mmclip.roles import direction_weights
from mmclip.training.step import TrainStep
from mmclip.training.text_task import TextBatch, TextData, TextTask, how_to_score
from tests.helpers.texts import WORDS, dataset_of, make_beir, make_bert, make_decoder, write_jsonl

LONG = " ".join(WORDS[:40])
CPU = torch.device("cpu")


def triples(folder: Path, n: int = 24, negatives: int = 0) -> Path:
    rng = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    rows = [{"query": text(3), "positive": text(7), **{f"negative_{k}": text(8) for k in range(negatives)}}
            for _ in range(n)]  # fmt: skip
    rows[1]["query"] = rows[0]["query"]  # known positives of one another
    return write_jsonl(folder / "triples.jsonl", rows)


def task_of(model: TextEncoder, path: Path, **settings: Any) -> TextTask:
    known: dict[str, Any] = {"model": "m", "train_data": str(path), "batch_size": 6, "lr": 1e-3, "watch_queries": 0}
    config = TextTrainConfig(**known | settings)
    return TextTask.open(config, TextData(open_pairs(path), None, []), model, CPU)


# --- against sentence-transformers' trainer ---------------------------------------------------------------------------


class Collator:
    """Columns of tokens, cut and prompted by role."""

    valid_label_columns = ("label",)

    def __init__(self, model: TextEncoder) -> None:
        self.model = model

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {"label": torch.tensor([row["label"] for row in rows])}
        for column in (name for name in rows[0] if name != "label"):
            tokens = self.model.tokens([row[column] for row in rows], "query" if column == "query" else "document")
            batch |= {f"{column}_{name}": value for name, value in tokens.items()}
        return batch


class Trainer(SentenceTransformerTrainer):
    """The stock trainer on our batches, without decay of gamma; keeps every step's loss."""

    losses: list[float]

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if not name.startswith("loss.")]

    def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, *_: Any, **__: Any) -> Any:
        class Batches(DefaultBatchSampler):
            def __iter__(self) -> Iterator[list[int]]:
                order = np.random.default_rng((0, self.epoch)).permutation(len(dataset)).tolist()
                yield from (order[i : i + batch_size] for i in range(0, len(self) * batch_size, batch_size))

            def __len__(self) -> int:
                return len(dataset) // batch_size

        return Batches(dataset, batch_size, drop_last)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = super().compute_loss(*args, **kwargs)
        self.losses.append(float(value.detach()))
        return value


class Clamp(TrainerCallback):
    def __init__(self, loss: RoleRankingLoss) -> None:
        self.loss = loss

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.loss.clamp_logit_scale()


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "cosine", "warmup": 3},
        {"norm": "learned", "loss": "both", "learn_scale": True, "gamma_lr": 0.05, "grad_clip_norm": 0.1},
        {"norm": "dot", "positives": "multi", "focal": 1.0, "norm_drift": 0.1, "learn_scale": True, "negatives": 2},
        {"norm": "qnorm", "loss": "d2q", "negatives": 1},
        {"norm": "learned", "learn_scale": True, "negatives": 2, "mini_batch_size": 4},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_run_equals_one_of_sentence_transformers_trainer_step_by_step(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = dict(settings)
    path = triples(tmp_path, negatives=settings.pop("negatives", 0))
    folder = make_bert(tmp_path / "bert")
    steps = 10  # of 4 an epoch
    ours = load_text_model(str(folder), query_length=6)
    task = task_of(ours, path, max_steps=steps, wd=0.1, **settings)
    step = TrainStep(task)
    found = [step.run(batch, i, log=True)["loss"] for i, batch in zip(range(steps), endless(task), strict=False)]

    theirs, config, pairs = load_text_model(str(folder), query_length=6), task.config, task.pairs
    loss = RoleRankingLoss(
        theirs.encoder, direction_weights(config.loss, None, text=True), config.norm, config.positives,
        learn_scale=config.learn_scale, focal=config.focal, norm_drift=config.norm_drift,
        relevant=torch.from_numpy(pairs.relevant),
    )  # fmt: skip
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=config.batch_size,
        dataloader_drop_last=True, learning_rate=config.lr, weight_decay=config.wd, warmup_steps=config.warmup,
        learning_rate_mapping={"gamma_hat": config.gamma_lr} if config.norm == "learned" else {},
        max_grad_norm=config.grad_clip_norm, use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = Trainer(model=theirs.encoder, args=arguments, train_dataset=dataset_of(pairs), loss=loss,
                      data_collator=Collator(theirs), callbacks=[Clamp(loss)])  # fmt: skip
    trainer.losses = []
    trainer.train()
    assert found == pytest.approx(trainer.losses, abs=1e-5) and len(set(found)) == steps
    wanted = dict(theirs.encoder.named_parameters())
    for name, parameter in ours.encoder.named_parameters():
        if name.endswith("key.bias"):  # no score depends on it: AdamW makes full steps of its gradient's rounding
            continue
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    for name, value in task.loss.state_dict().items():
        torch.testing.assert_close(value, loss.loss.state_dict()[name], rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def endless(task: TextTask) -> Iterator[TextBatch]:
    for epoch in range(task.total_steps):
        yield from task.batches(epoch)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_bert, make_decoder])
def test_a_batch_is_cut_by_role_and_prompted_as_evaluation_does_it(make: Any, tmp_path: Path) -> None:
    model = load_text_model(str(make(tmp_path)), query_length=6, document_length=11, query_prompt="no ",
                            document_prompt="")  # fmt: skip
    rows = [{"query": LONG, "positive": LONG, "negative": WORDS[3]},
            {"query": WORDS[1], "positive": " ".join(WORDS[5:9]), "negative": LONG}]  # fmt: skip
    path = write_jsonl(tmp_path / "triples.jsonl", rows)
    task = task_of(model, path, batch_size=2)
    batch = TextBatch(task.pairs)
    tokens = task.inputs(batch)
    assert [column["input_ids"].shape[1] for column in tokens] == [6, 11, 11]
    with torch.no_grad():
        outputs = task.encoder.eval()(*tokens)
    assert [tuple(x.shape) for x in outputs] == [(2, 32), (2, 32), (2, 1, 32)]
    for trained_on, column, role in zip(outputs, rows[0], ("query", "document", "document"), strict=True):
        evaluated = model.encode([row[column] for row in rows], role)
        torch.testing.assert_close(trained_on.reshape(2, 32), evaluated, rtol=1e-5, atol=1e-6)
    unprompted = model.encode([row["query"] for row in rows], "document")
    assert not torch.allclose(unprompted, model.encode([row["query"] for row in rows], "query"), atol=1e-3)


def test_an_epoch_has_every_pair_once_in_an_order_of_its_own_shared_out_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = load_text_model(str(make_bert(tmp_path))), triples(tmp_path, 23)

    def orders(epoch: int, seed: int = 3, start: int = 0, **how: Any) -> list[list[str]]:
        return [batch.keys for batch in task_of(model, path, seed=seed, **how).batches(epoch, start)]

    first = orders(0, batch_size=4)
    assert [len(keys) for keys in first] == [4] * 5 and len({tuple(keys) for keys in first}) == 5
    assert first == orders(0, batch_size=4) != orders(1, batch_size=4)
    assert first != orders(0, seed=4, batch_size=4) and orders(0, start=3, batch_size=4) == first[3:]
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr("mmclip.distributed.world", lambda rank=rank: (rank, 2))
        ranks.append(orders(0, batch_size=2))
    assert [a + b for a, b in zip(*ranks, strict=True)] == first, "two ranks' batches are one process's"


def test_a_batch_splits_into_parts_in_order(tmp_path: Path) -> None:
    whole = TextBatch(open_pairs(triples(tmp_path, 14)))
    assert [len(part.keys) for part in whole.split(4)] == [4, 4, 4, 2] and len(whole.split(4, 5)) == 5
    assert [key for part in whole.split(4) for key in part.keys] == whole.keys and whole.split(14) == [whole]


# --- before the first step --------------------------------------------------------------------------------------------


class Encoder:
    """Counts its calls; a text's embedding is (its words, the role)."""

    dim = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def encode(self, texts: list[str], role: str, batch_size: int, progress: bool = True) -> torch.Tensor:
        self.calls.append((role, texts))
        return torch.tensor([[len(t.split()), float(role == "document")] for t in texts])


@pytest.fixture
def task(tmp_path: Path) -> Any:
    task: Any = task_of(load_text_model(str(make_bert(tmp_path))), make_beir(tmp_path / "beir"))
    task.model = Encoder()
    return task


def collection(titles: list[str], texts: list[str]) -> BeirCollection:
    documents = [f"{a} {b}".strip() for a, b in zip(titles, texts, strict=True)]
    names = [f"d{i}" for i in range(len(documents))]
    return BeirCollection("p", "test", ["q"], ["what"], names, documents, titles, np.array([[0, 0]]), np.ones(1))


def test_documents_of_another_split_are_encoded_once(task: Any) -> None:
    for _ in range(2):
        _, document = task._embed(collection(["a", ""], ["b c", "d"]))
        assert document[:, 0].tolist() == [3, 1]
    assert [role for role, _ in task.model.calls] == ["document", "query", "query"]
    task._embed(collection(["a", ""], ["b c", "other words"]))
    assert [role for role, _ in task.model.calls].count("document") == 2


def test_a_title_asks_for_its_text_alone_where_there_are_enough(task: Any) -> None:
    titles = [f"title {i}" for i in range(10)] + ["title 0", "", "alone"]
    texts = [f"text of {i}" for i in range(10)] + ["twice", "untitled", ""]
    assert task._titles(collection(titles, texts)) is not None
    (query, queries), (document, documents) = task.model.calls
    assert (query, document) == ("query", "document")
    assert queries == [f"title {i}" for i in range(10)] and documents == [f"text of {i}" for i in range(10)]
    assert task._titles(collection(titles[:7], texts[:7])) is None, "8 are needed, 4 a dimension"


def test_training_pairs_are_measured_with_each_text_once(task: Any) -> None:
    query, document, (queries, documents) = task._training_pairs()
    assert len(queries) == len(documents) == min(len(task.pairs), 16) and len(query) == queries.max() + 1
    calls = task.model.calls
    assert all(len(texts) == len(set(texts)) for _, texts in calls)
    judged = set(zip(task.pairs.queries, task.pairs.documents, strict=True))
    assert {(calls[0][1][q], calls[1][1][d]) for q, d in zip(queries, documents, strict=True)} <= judged
    assert document[:, 1].eq(1).all() and query[:, 1].eq(0).all()


def test_the_model_says_how_to_score_it() -> None:
    for norm, words in (("dnorm", "by cosine"), ("dot", "raw embeddings"), ("qnorm", "raw embeddings")):
        assert words in how_to_score(norm, 0.25)
    assert "to the power of 0.25" in how_to_score("learned", 0.25)
