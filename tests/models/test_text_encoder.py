"""Text encoders: raw vectors, Normalize off, roles, weights; folders that are damaged or hostile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import AutoModel, AutoTokenizer

from mmclip.config import TextModelConfig
from mmclip.errors import UserError
from mmclip.models import text_encoder
from mmclip.models.export import export_text
from mmclip.models.text_encoder import load_text_model, read_text_metadata, resolve_model, text_precision
from tests.helpers.texts import WORDS, make_bert, make_decoder

TEXTS = [" ".join(WORDS[i : i + 1 + i % 5]) for i in range(12)]
FACTS = {"norm": "qnorm", "gamma_q": 1.0, "gamma_d": 0.0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    """A copy of the BERT folder to do harm to."""
    return Path(shutil.copytree(bert, tmp_path / "copy"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def insert(folder: Path, place: int, kind: str, path: str, at: str = "sentence_transformers.models") -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(place, {"idx": place, "name": f"new{len(modules)}", "path": path, "type": f"{at}.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))


def refusal(name: object, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        load_text_model(str(name), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_normalize_is_taken_off_and_what_is_left_are_its_raw_vectors(bert: Path) -> None:
    model, kept = load_text_model(str(bert)), load_text_model(str(bert), keep_normalize=True)
    raw = model.encode(TEXTS, "document", batch_size=5)
    stock = torch.from_numpy(SentenceTransformer(str(bert), device="cpu").encode(TEXTS))
    assert model.removed == ["Normalize"] and kept.removed == [] and model.notes == kept.notes == []
    assert raw.shape == (12, model.dim) and raw.dtype == torch.float32
    assert raw.norm(dim=1).std() > 0.05
    torch.testing.assert_close(kept.encode(TEXTS, "document"), stock)
    torch.testing.assert_close(torch.nn.functional.normalize(raw), stock)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_a_plain_folder_is_pooled_as_asked(tmp_path: Path, pooling: str) -> None:
    plain = make_bert(tmp_path / "plain", pooling=None)
    found = load_text_model(str(plain), pooling=pooling).encode(TEXTS, "query")
    tokenizer, network = AutoTokenizer.from_pretrained(plain), AutoModel.from_pretrained(plain).eval()
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = {"mean": states.mean(dim=0), "cls": states[0], "lasttoken": states[-1]}[pooling]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)
    assert "no pooling" in refusal(plain) and "mean, cls, lasttoken" in refusal(plain)


@pytest.mark.parametrize("pooling", ["lasttoken", None])
def test_a_decoder_gives_a_text_one_vector_alone_in_any_batch_and_padded_on_any_side(
    tmp_path: Path, pooling: str | None
) -> None:
    found = []
    for side in ("left", "right"):
        folder = make_decoder(tmp_path / side, pooling=pooling, padding_side=side)
        model = load_text_model(str(folder), pooling=None if pooling else "lasttoken")
        assert model.encoder.tokenizer.padding_side == side
        found.append(model.encode(TEXTS, "document", batch_size=len(TEXTS)))
        found.append(torch.cat([model.encode([text], "document") for text in TEXTS]))
        assert found[0].norm(dim=1).std() > 0.05 and len(found[0].unique(dim=0)) == len(set(TEXTS))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-5)


def test_prompts_and_lengths_follow_the_role(tmp_path: Path) -> None:
    folder = make_bert(tmp_path, normalize=False, prompts={"query": "back bal: ", "document": "bamp: "})
    model = load_text_model(str(folder), query_length=4, document_length=1000)
    assert model.prompts == {"query": "back bal: ", "document": "bamp: "}
    assert (model.length_of("query"), model.length_of("document")) == (4, 64)
    bare = load_text_model(str(folder), query_prompt="", document_prompt="")
    torch.testing.assert_close(model.encode(["del"], "document"), bare.encode(["bamp: del"], "document"))
    # [CLS], two tokens, [SEP]: the prompt fills what the query may have
    torch.testing.assert_close(model.encode(["del", "dest"], "query"), bare.encode(["back bal"] * 2, "query"))
    assert model.encoder.max_seq_length == 64


def add_dense(folder: Path) -> None:
    """Transformer, Pooling, Dense, Normalize."""
    (folder / "9_Dense").mkdir()
    Dense(32, 8).save(str(folder / "9_Dense"))
    insert(folder, 2, "Dense", "9_Dense")


def test_only_final_normalize_modules_go(copy: Path) -> None:
    add_dense(copy)
    insert(copy, 2, "Normalize", "")
    insert(copy, 5, "Normalize", "")
    model = load_text_model(str(copy))
    assert model.removed == ["Normalize", "Normalize"] and model.dim == 8
    assert [type(m).__name__ for m in model.encoder] == ["Transformer", "Pooling", "Normalize", "Dense"]
    assert len(model.notes) == 1 and "before Dense" in model.notes[0]
    stock = torch.from_numpy(SentenceTransformer(str(copy), device="cpu").encode(TEXTS))
    raw = model.encode(TEXTS, "query")
    torch.testing.assert_close(torch.nn.functional.normalize(raw), stock)
    assert raw.norm(dim=1).std() > 1e-3


@pytest.mark.parametrize("kind", ["spy.Spy", "os.system", "sentence_transformers.nowhere.Spy"])
def test_modules_of_others_do_not_run(copy: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "spy.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass Spy: pass\n")
    monkeypatch.syspath_prepend(str(copy))
    at, name = kind.rsplit(".", 1)
    insert(copy, 1, name, "", at)
    assert "cannot be loaded" in refusal(copy)
    assert not (copy / "ran").exists()


def test_a_config_with_code_does_not_run_and_a_model_without_pooling_is_named(copy: Path) -> None:
    modules = (copy / "modules.json").read_text()
    (copy / "modules.json").write_text(json.dumps(json.loads(modules)[:1]))
    assert "no pooling among its modules" in refusal(copy)
    (copy / "modules.json").write_text(modules)
    (copy / "spy.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n")
    edit(copy / "config.json", model_type="unheard-of", auto_map={"AutoConfig": "spy.C", "AutoModel": "spy.M"})
    (copy / "modules.json").rename(copy / "no_modules.json")
    for options in ({}, {"random_init": True}):
        assert "cannot be loaded" in refusal(copy, pooling="mean", **options)
    (copy / "no_modules.json").rename(copy / "modules.json")
    assert "cannot be loaded" in refusal(copy)
    assert not (copy / "ran").exists()


@pytest.mark.parametrize("file", ["modules.json", "config.json", "model.safetensors", "1_Pooling/config.json"])
def test_damaged_folders_are_one_line(copy: Path, file: str) -> None:
    for content in (b"", b"{", b"[]", b"\xff\xfe\x00"):
        (copy / file).write_bytes(content)
        assert "--model" in refusal(copy)


def test_empty_texts_have_a_vector(bert: Path, decoder: Path, tmp_path: Path) -> None:
    for folder in (bert, decoder):
        model = load_text_model(str(folder))
        for texts in (["", "back", " \n"], [""]):
            found = model.encode(texts, "document")
            assert found.isfinite().all() and found[0].norm() > 0
    assert model.encode([], "query").shape == (0, 32)

    endless = make_decoder(tmp_path)  # a tokenizer that marks no ends makes nothing of an empty text
    edit(endless / "tokenizer.json", post_processor=None)
    model = load_text_model(str(endless))
    for texts in (["", "back", ""], [""]):
        found = model.encode(texts, "document")
        assert not found[0].any() and not found[-1].any()
    torch.testing.assert_close(model.encode(["", "back"], "query")[1], model.encode(["back"], "query")[0])


def test_what_is_saved_is_loaded_by_sentence_transformers_and_by_a_run(bert: Path, tmp_path: Path) -> None:
    model = load_text_model(str(bert), query_prompt="bal ")
    run = tmp_path / "run"
    for norm, gamma_d, name in (("dnorm", 1.0, "cosine"), ("learned", 0.2, "dot"), ("qnorm", 0.0, "dot")):
        facts = FACTS | {"norm": norm, "gamma_d": gamma_d}
        export_text(run / "model", model, facts)
        stock = SentenceTransformer(str(run / "model"), device="cpu")
        assert stock.similarity_fn_name == name
        assert read_text_metadata(str(run)) == facts
    raw = model.encode(TEXTS, "document")
    torch.testing.assert_close(torch.from_numpy(stock.encode_document(TEXTS)), raw)
    torch.testing.assert_close(torch.from_numpy(stock.encode_query(TEXTS)), model.encode(TEXTS, "query"))
    assert {p.name for p in run.iterdir()} == {"model"}

    again = load_text_model(str(run))
    assert again.metadata == facts and again.removed == [] and again.name == str(run)
    assert resolve_model(str(run)) == resolve_model(str(run / "model")) == str(run / "model")
    torch.testing.assert_close(again.encode(TEXTS, "document"), raw)


def test_damaged_metadata_are_one_line(copy: Path) -> None:
    for content, message in (
        ('{"gamma_d": "much"}', 'gamma_d is "much": expected a number from 0 to 1'),
        ('{"norm": 3}', "norm is 3: expected a text"),
        ("{", "not readable as JSON"),
    ):
        (copy / "mmclip.json").write_text(content)
        assert message in refusal(copy)


def test_texts_are_cut_as_in_training_unless_settings_say_otherwise(bert: Path, tmp_path: Path) -> None:
    base = load_text_model(str(bert))
    for lengths in ({"query": 8, "document": 12}, None, "long", {"query": "8"}, {"query": -1, "document": None}):
        export_text(tmp_path / "model", base, FACTS | {"lengths": lengths})
        model = load_text_model(TextModelConfig(model=str(tmp_path / "model"), document_length=10), torch.device("cpu"))
        trained = 8 if lengths == {"query": 8, "document": 12} else base.encoder.max_seq_length
        assert [model.length_of(role) for role in ("query", "document")] == [trained, 10]
        assert model.tokens(["w " * 90], "document")["input_ids"].shape[1] == 10
        assert model.tokens(["w " * 90], "query")["input_ids"].shape[1] == trained


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and no network, with the number of questions to the hub."""
    asked = tmp_path / "asked"
    asked.touch()

    def nothing(*_: object, **__: object) -> None:
        asked.write_text(asked.read_text() + "?")
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", nothing)
    monkeypatch.setattr(huggingface_hub.file_download, "get_hf_file_metadata", nothing)
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path / "cache"))
    text_encoder.hub_answers.cache_clear()
    yield tmp_path / "cache"
    text_encoder.hub_answers.cache_clear()
    assert len(asked.read_text()) <= 1


def test_a_hub_name_without_a_network_ends_at_once(hub_cache: Path, tmp_path: Path) -> None:
    for name in ("nobody/nothing-there", "a/path/that/is/none", str(tmp_path / "asked")):
        assert "no such folder" in refusal(name) and "the hub does not answer" in refusal(name)


def test_a_hub_name_is_loaded_from_the_cache(hub_cache: Path, bert: Path, tmp_path: Path) -> None:
    commit = "0" * 40
    plain = make_bert(tmp_path / "plain", pooling=None)
    for name, folder in (("sentence-transformers--own", bert), ("org--plain", plain)):
        there = hub_cache / f"models--{name}"
        shutil.copytree(folder, there / "snapshots" / commit)
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text(commit)
        (there / "snapshots" / commit / "mmclip.json").write_text(json.dumps(FACTS))
    model = load_text_model("own")
    assert model.metadata == FACTS and model.removed == ["Normalize"] and model.name == "own"
    text_encoder.hub_answers.cache_clear()
    (tmp_path / "asked").write_text("")
    assert "no pooling: a plain transformers model needs --pooling" in refusal("org/plain")
    torch.testing.assert_close(
        load_text_model("org/plain", pooling="mean").encode(TEXTS, "query"),
        load_text_model(str(plain), pooling="mean").encode(TEXTS, "query"),
    )


def test_minilm_vectors_are_stock_ones_before_their_normalize(shared: Path) -> None:
    folder = shared / "models" / "all-MiniLM-L6-v2"
    model = load_text_model(str(folder))
    assert model.removed == ["Normalize"] and model.notes == [] and model.dim == 384
    assert {p.dtype for p in model.encoder.parameters()} == {torch.float32}
    texts = ["a wing in a slipstream", "", "measles in 2019"]
    raw = model.encode(texts, "document")
    stock = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    torch.testing.assert_close(torch.nn.functional.normalize(raw), torch.from_numpy(stock.encode(texts)))
    assert raw.norm(dim=1).std() > 0.05


# --- weights ----------------------------------------------------------------------------------------------------------


def test_half_precision_checkpoints_are_float32_and_autocast_is_an_option(copy: Path) -> None:
    assert [text_precision("auto", torch.device(d)) for d in ("cpu", "cuda", "mps")] == ["fp32", "amp_bf16", "fp32"]
    assert text_precision("fp32", torch.device("cuda")) == "fp32"
    whole = load_text_model(str(copy)).encode(TEXTS, "query")
    weights = load_file(copy / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    edit(copy / "config.json", dtype="float16")
    model = load_text_model(str(copy))
    assert {p.dtype for p in model.encoder.parameters()} == {torch.float32}
    found = model.encode(TEXTS, "query")
    torch.testing.assert_close(found, whole, atol=0.02, rtol=0.02)
    rough = load_text_model(str(copy), precision="amp_bf16").encode(TEXTS, "query")
    assert rough.dtype == torch.float32 and not torch.equal(rough, found)
    torch.testing.assert_close(rough, found, atol=0.2, rtol=0.1)


def test_random_weights_follow_the_seed_need_no_weights_and_reach_what_follows_the_transformer(
    copy: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()}
    first, same, other = (
        load_text_model(str(copy), random_init=True, seed=s).encode(TEXTS, "query") for s in (1, 1, 2)
    )
    assert torch.equal(first, same) and (first - other).abs().max() > 0.01
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()} == before
    (copy / "model.safetensors").unlink()
    bare = load_text_model(str(copy), random_init=True, seed=1)
    assert torch.equal(bare.encode(TEXTS, "query"), first)
    assert bare.notes == [] and "cannot be loaded" in refusal(copy)
    for folder, pooling in ((decoder, None), (make_decoder(tmp_path / "plain", pooling=None), "lasttoken")):
        a, b = (load_text_model(str(folder), pooling=pooling, random_init=True, seed=s) for s in (1, 2))
        assert (a.encode(TEXTS, "query") - b.encode(TEXTS, "query")).abs().max() > 1e-3
    add_dense(copy)
    dense = [load_text_model(str(copy), random_init=True, seed=s).encoder[2].linear.weight for s in (1, 1, 2)]
    assert torch.equal(dense[0], dense[1]) and not torch.equal(dense[0], dense[2])
    monkeypatch.setattr(text_encoder, "hub_answers", lambda name: True)
    assert "--random-init needs a folder" in refusal("org/name", random_init=True)


def test_weights_that_a_checkpoint_lacks_are_noted(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    lost = next(k for k in weights if "intermediate" in k)
    save_file({k: v for k, v in weights.items() if k != lost}, copy / "model.safetensors", metadata={"format": "pt"})
    model = load_text_model(str(copy))
    assert len(model.notes) == 1 and lost.rsplit(".", 2)[1] in model.notes[0]
    weights[lost].fill_(float("nan"))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in refusal(copy)
