"""The draft engine: the decoder is transformers', bit for bit, from every layout; the MTP head is the families'."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.draft import trunk, vocabulary
from mtpcheck.draft.config import config_of, model_config
from mtpcheck.draft.head import HeadFacts
from mtpcheck.draft.passage import ABLATIONS, BLOCK_SKIPPED, Passage, Run
from mtpcheck.draft.run import Engine, run
from mtpcheck.draft.twin import twin
from mtpcheck.errors import COULD_NOT_JUDGE, FamilyError, UnsupportedError, UsageError
from mtpcheck.family import load_family
from mtpcheck.megatron import Options
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorMap, TensorRef, read_tensor_map
from mtpcheck.topology import Topology
from tests.coded import index_again, is_coded
from tests.coded import make as make_coded
from tests.conftest import FIXTURES
from tests.oracle import forward, read_parts

NAMES = (
    "deepseek_v3",
    "deepseek_v3_noq",
    "glm4_moe",
    "glm4_moe_nocopies",
    "glm_moe_dsa",
    "llama_mtp",
    "mimo",
    "qwen2_mtp",
    "qwen3_mtp",
)
IDS = [(7 * i * i + 3 * i + 5) % 260 for i in range(24)]
OTHER = [(11 * i * i + i + 40) % 260 for i in range(17)]
every_fixture = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=len(NAMES))
def opened(name: str) -> tuple[Checkpoint, TensorMap]:
    checkpoint = open_checkpoint(FIXTURES / name)
    return checkpoint, read_tensor_map(checkpoint)


def choosing(name: str, topk: int) -> tuple[Checkpoint, TensorMap]:
    """The fixture with another number of positions that an indexer may choose, if it has one."""
    checkpoint, tensor_map = opened(name)
    facts = {**tensor_map.facts, **({"index_topk": topk} if name == "glm_moe_dsa" else {})}
    return checkpoint, replace(tensor_map, model=replace(tensor_map.model, facts=facts))


def without_ties(name: str) -> tuple[Checkpoint, TensorMap]:
    """A tiny indexer's scores are zero for many positions; which of these it takes depends on how many there are. Here
    it takes all."""
    return choosing(name, 128)


def engine(name: str, **options: bool) -> Engine:
    return Engine(*opened(name), **options)


def run_folder(folder: Path, *texts: list[int]) -> Run:
    checkpoint = open_checkpoint(folder)
    return run(Engine(checkpoint, read_tensor_map(checkpoint)), texts, keep_logits=True)


def of_transformers(folder: Path, **changes: Any) -> Any:
    """The whole model, as `from_pretrained` loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    known: dict[str, Any] = changes
    if config["model_type"] == "mimo":  # which transformers knows as Qwen2
        own = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
        known["config"] = AutoConfig.for_model("qwen2", **own)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kinds, **known)


# ---- the decoder


@every_fixture
def test_streamed_is_whole_bit_for_bit(name: str) -> None:
    with torch.no_grad():
        expected = of_transformers(FIXTURES / name)(torch.tensor([IDS])).logits[0]
    (passage,) = run(engine(name), [IDS], keep_logits=True).passages
    assert np.array_equal(passage.logits[0], expected.numpy())
    assert np.array_equal(passage.main, expected.argmax(-1).numpy())


def test_an_indexer_chooses_what_it_chooses_in_the_whole_model() -> None:
    few, all_of_them = (
        run(Engine(*choosing("glm_moe_dsa", topk)), [IDS], keep_logits=True).passages[0] for topk in (6, 64)
    )
    with torch.no_grad():
        expected = of_transformers(FIXTURES / "glm_moe_dsa", index_topk=6)(torch.tensor([IDS])).logits[0]
    assert np.array_equal(few.logits[0], expected.numpy())
    assert not np.array_equal(few.logits[0], all_of_them.logits[0])


@every_fixture
def test_no_weight_stays_in_memory(name: str) -> None:
    own = engine(name)
    run(own, [IDS])
    modules = (own.trunk._decoder, *own.trunk._blocks)
    held = {key for module in modules for key, value in module.state_dict().items() if not value.is_meta}
    assert not held


@every_fixture
def test_resident_is_streamed_and_reads_once(name: str) -> None:
    own = engine(name, resident=True)
    first = run(own, [IDS])
    second = run(own, [IDS])
    assert first.passages[0].logits_digest == run(engine(name), [IDS]).passages[0].logits_digest
    assert first.passages[0].logits_digest == second.passages[0].logits_digest
    assert first.touched == second.touched
    assert second.nbytes == 0 < first.nbytes


def test_a_change_of_one_norm_shows() -> None:
    assert digests("glm4_moe") != digests("glm4_moe", changed("glm4_moe", "layers.1.pre_mlp_norm"))


@every_fixture
def test_texts_of_unequal_length_are_what_they_are_alone(name: str) -> None:
    own = Engine(*without_ties(name))
    together = run(own, [IDS, OTHER], keep_logits=True)
    for passage, text in zip(together.passages, (IDS, OTHER), strict=True):
        (alone,) = run(own, [text], keep_logits=True).passages
        assert list(passage.ids) == text
        for logits, expected in zip(passage.logits, alone.logits, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_padding_is_routed_to_no_expert() -> None:
    alone, padded = (run(engine("glm4_moe_nocopies"), texts) for texts in ([[9]], [[9], [9] * 20]))
    only = run(engine("glm4_moe_nocopies"), [[9] * 20])
    assert padded.touched.ran == alone.touched.ran | only.touched.ran
    assert alone.touched.ran < padded.touched.ran


# ---- the head


def mtp_of_transformers(name: str) -> tuple[Any, Any]:
    from transformers.modeling_layers import MtpModel

    model = of_transformers(FIXTURES / name)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    return model, MtpModel.from_pretrained(model)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("deepseek_v3", "glm4_moe"))])
def test_drafts_are_those_of_transformers_bit_for_bit(name: str) -> None:
    """With one more slot, whose token is made up, so that both multiply matrices of one shape. At the positions of
    engines; transformers counts from one more, and is told otherwise."""
    from transformers.cache_utils import MtpCache

    model, mtp = mtp_of_transformers(name)
    ids, after = torch.tensor([IDS]), torch.tensor([[*IDS[1:], 77]])
    no_padding = torch.zeros_like(ids, dtype=torch.bool)
    own = engine(name)
    hidden = own.hidden(ids, no_padding)
    ours = own.heads[0].run(after, hidden.normed, no_padding).normed
    (passage,) = run(own, [IDS], keep_logits=True).passages
    with torch.no_grad():
        assert torch.equal(hidden.normed, model.get_decoder()(ids, use_cache=False).last_hidden_state)
        for start in (0, 1):
            cache = MtpCache(config=model.config.get_mtp_config())
            positions = torch.arange(start, start + len(IDS))[None]
            y = mtp.forward_layer(0, hidden.normed, positions, cache, input_ids=after)
            assert torch.equal(ours, y) == (start == 0)
            logits = mtp._project_to_logits(y)[0, :-1].numpy()
            np.testing.assert_allclose(passage.logits[1], logits, rtol=0, atol=1e-4)


@every_fixture
def test_drafts_are_those_of_plain_arithmetic(name: str) -> None:
    """A forward of our own, which shares nothing with the engine but the parts; every depth, and MiMo's raw feed."""
    _, tensor_map = opened(name)
    facts = {**tensor_map.facts, "latent_norm_eps": 1e-6}
    expected = forward(read_parts(tensor_map), facts, torch.tensor([IDS]), feed_prenorm=name == "mimo")
    (passage,) = run(engine(name), [IDS], keep_logits=True).passages
    assert len(passage.drafts) == len(expected.mtp) == (2 if name == "llama_mtp" else 1)
    for depth, logits in enumerate((expected.main, *expected.mtp)):
        rows = len(IDS) - depth
        np.testing.assert_allclose(passage.logits[depth], logits[0, :rows].numpy(), rtol=0, atol=1e-4)
        chosen = passage.main if depth == 0 else passage.drafts[depth - 1]
        assert np.array_equal(chosen, passage.logits[depth].argmax(-1))
        assert chosen.shape == (rows,) and chosen.dtype == np.int64


def test_the_raw_state_is_not_the_normed_one() -> None:
    own = engine("mimo")
    raw = run(own, [IDS]).passages[0]
    own.heads[0].facts = HeadFacts(fed="normed")
    normed = run(own, [IDS]).passages[0]
    assert np.array_equal(raw.main, normed.main)
    assert raw.logits_digest != normed.logits_digest


def test_ablations_take_away_what_they_say() -> None:
    checkpoint, tensor_map = opened("glm4_moe")
    (whole,) = run(engine("glm4_moe"), [IDS]).passages
    assert tuple(whole.ablated) == ABLATIONS
    assert all(len(drafts) == len(IDS) - 1 for drafts in whole.ablated.values())
    without = {half: changed("glm4_moe", f"mtp.0.proj.{half}", zero=True) for half in ("embed", "hidden")}
    without["block"] = changed("glm4_moe", *(f"mtp.0.{part}" for part in OUTPUTS), zero=True)
    names = dict(zip(("block", "embed", "hidden"), ABLATIONS, strict=True))
    assert names["block"] == BLOCK_SKIPPED
    for what, parts in without.items():
        (expected,) = run(Engine(checkpoint, replace(tensor_map, parts=parts)), [IDS]).passages
        assert np.array_equal(whole.ablated[names[what]], expected.drafts[0])
        assert not np.array_equal(whole.drafts[0], expected.drafts[0])
    assert not run(engine("glm4_moe"), [IDS], ablate=False).passages[0].ablated


OUTPUTS = ("attn.o", "mlp.shared.down", *(f"mlp.experts.{e}.down" for e in range(4)))


def test_norms_of_one_plus_w() -> None:
    """A family whose stored weights are one less, and says so, gives what the other gives."""
    checkpoint, tensor_map = opened("qwen3_mtp")
    parts = dict(tensor_map.parts)
    for part in ("mtp.0.embed_norm", "mtp.0.hidden_norm", "mtp.0.final_norm"):
        weight = torch.frombuffer(bytearray(parts[part].read()), dtype=torch.bfloat16).float()
        parts[part] = in_memory("F32", weight - 1)
    own = Engine(checkpoint, replace(tensor_map, parts=parts))
    own.heads[0].facts = HeadFacts(norm="1+w")
    (ours,), (expected,) = (run(each, [IDS], keep_logits=True).passages for each in (own, engine("qwen3_mtp")))
    np.testing.assert_allclose(ours.logits[1], expected.logits[1], rtol=0, atol=1e-4)


def test_a_head_of_its_own_is_used_where_a_family_says_so() -> None:
    checkpoint, tensor_map = opened("glm4_moe")
    parts = changed("glm4_moe", "mtp.0.head", "mtp.0.embed")
    own = Engine(checkpoint, replace(tensor_map, parts=parts))
    shared = run(own, [IDS]).passages[0]
    assert shared.logits_digest == digests("glm4_moe")
    own.heads[0].facts = HeadFacts(separate=("head",))
    separate = run(own, [IDS])
    assert np.array_equal(separate.passages[0].main, shared.main)
    assert separate.passages[0].logits_digest != shared.logits_digest
    assert "mtp.0.head" in separate.touched.ran and "mtp.0.embed" in separate.touched.not_ran


def test_unknown_wiring_is_refused() -> None:
    family = load_family("mimo")
    with pytest.raises(FamilyError, match="mimo: mtp:"):
        HeadFacts.of(replace(family, mtp={**family.mtp, "fed": "cooked"}))


# ---- layouts and encodings


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    convert(FIXTURES / name, tmp_path / "torch_dist")
    convert(FIXTURES / name, tmp_path / "torch", to="torch", options=Options(topology=Topology(tp=2)))
    expected = run(engine(name), [IDS, OTHER])
    for layout in ("torch_dist", "torch"):
        checkpoint = open_checkpoint(tmp_path / layout)
        bare = replace(checkpoint, manifest=None)  # nothing but Megatron's arguments
        for own in (checkpoint, bare):
            found = run(Engine(own, read_tensor_map(own, expected_family(name))), [IDS, OTHER])
            for passage, reference in zip(found.passages, expected.passages, strict=True):
                assert_same(passage, reference)


def expected_family(name: str) -> str:
    return opened(name)[1].family


def assert_same(passage: Passage, reference: Passage) -> None:
    assert passage.logits_digest == reference.logits_digest
    assert np.array_equal(passage.main, reference.main)
    for name, drafts in reference.ablated.items():
        assert np.array_equal(passage.ablated[name], drafts)


def test_fp8_runs_as_the_values_it_stands_for(tmp_path: Path) -> None:
    coded = make_coded(tmp_path / "coded")
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in sorted(coded.glob("*.safetensors")):
        tensors = load_file(path)
        values = dict(tensors)
        for name in filter(is_coded, tensors):
            codes = tensors[name].view(torch.uint8)
            codes[codes & 0x7F == 0x7F] = 0x10  # no NaN
            scales = values.pop(name + "_scale_inv").fill_(0.01)
            rows, columns = codes.shape
            blocks = scales.repeat_interleave(40, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
            values[name] = (tensors[name].float() * blocks).bfloat16()
            tensors[name + "_scale_inv"] = scales
        save_file(tensors, path)
        save_file(values, plain / path.name)
    index_again(coded)
    index_again(plain)
    config = json.loads((coded / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    ours, expected = run_folder(coded, IDS), run_folder(plain, IDS)
    assert np.isfinite(ours.passages[0].logits[1]).all()
    assert ours.passages[0].logits_digest == expected.passages[0].logits_digest


def test_a_head_in_many_chunks_chooses_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = run(engine("glm4_moe"), [IDS], keep_logits=True).passages
    monkeypatch.setattr(vocabulary, "CHUNK", 64 * 64 * 4)
    (chunked,) = run(engine("glm4_moe"), [IDS], keep_logits=True).passages
    assert np.array_equal(chunked.main, whole.main)
    assert np.array_equal(chunked.drafts[0], whole.drafts[0])
    np.testing.assert_allclose(chunked.logits[1], whole.logits[1], rtol=0, atol=1e-4)


def test_of_equal_logits_the_first_is_chosen() -> None:
    checkpoint, tensor_map = opened("llama_mtp")
    parts = changed("llama_mtp", "head", zero=True)
    (passage,) = run(Engine(checkpoint, replace(tensor_map, parts=parts)), [IDS]).passages
    assert not passage.main.any()


# ---- what was touched


@dataclass(frozen=True)
class Memory:
    """A source of bytes that are no file."""

    data: bytes
    name: str = "memory"

    @property
    def size(self) -> int:
        return len(self.data)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return self.name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


def in_memory(dtype: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> TensorRef:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorRef(dtype, Plan.region(Memory(data), 0, shape or tuple(tensor.shape), tensor.element_size()))


def changed(name: str, *parts: str, zero: bool = False) -> dict[str, TensorRef]:
    """All parts of a fixture, some with other values."""
    known = dict(opened(name)[1].parts)
    for number, part in enumerate(parts):
        shape = known[part].shape
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * (0.0 if zero else 0.5)
        known[part] = in_memory("BF16", noise.bfloat16(), shape)
    return known


def digests(name: str, parts: dict[str, TensorRef] | None = None, text: list[int] = IDS) -> tuple[str, ...]:
    checkpoint, tensor_map = opened(name)
    own = replace(tensor_map, parts=parts or tensor_map.parts)
    return run(Engine(checkpoint, own), [text], ablate=False).passages[0].logits_digest


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("glm4_moe", IDS, "repeats embed"),
        ("glm4_moe_nocopies", [9, 8], "no token was routed"),
        ("glm_moe_dsa", IDS[:6], "the indexer chooses all of 6 positions"),
        ("deepseek_v3", [3, 4], "no token was routed"),
    ],
)
def test_what_is_told_untouched_changes_nothing(name: str, text: list[int], why: str) -> None:
    touched = run(engine(name), [text]).touched
    assert any(reason.startswith(why) for reason in touched.not_ran.values())
    assert touched.ran.isdisjoint(touched.not_ran)
    assert touched.ran | touched.not_ran.keys() == opened(name)[1].parts.keys()
    assert touched.embedding_rows == len({*text, 0})  # 0 follows the last token
    assert digests(name, changed(name, *touched.not_ran), text) == digests(name, text=text)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "llama_mtp", "mimo", "qwen3_mtp"])
def test_what_is_told_to_have_run_has_a_say(name: str) -> None:
    own = Engine(*choosing(name, 4))
    expected = run(own, [OTHER], ablate=False, keep_logits=True)
    for part in sorted(expected.touched.ran):
        own.weights.tensor_map = replace(own.tensor_map, parts=changed(name, part))
        (found,) = run(own, [OTHER], ablate=False, keep_logits=True).passages
        same = zip(found.logits, expected.passages[0].logits, strict=True)
        assert not all(np.array_equal(a, b) for a, b in same), part


def test_an_indexer_with_a_choice_runs() -> None:
    touched = run(Engine(*choosing("glm_moe_dsa", 6)), [IDS]).touched
    assert not [part for part in touched.not_ran if "indexer" in part]
    assert [part for part in touched.ran if "indexer" in part]


# ---- what cannot be judged


def test_a_model_that_transformers_lacks() -> None:
    checkpoint, tensor_map = opened("mimo")
    unknown = replace(load_family("mimo"), trunk_type="mimo")
    with pytest.raises(
        UnsupportedError, match=r"^could not judge: transformers .* no language model of type 'mimo'"
    ) as raised:
        model_config(unknown, config_of(checkpoint, tensor_map))
    assert raised.value.exit_code == COULD_NOT_JUDGE


def test_a_model_that_transformers_has_for_other_things_alone() -> None:
    with pytest.raises(UnsupportedError, match="no language model of type 'vit'"):
        model_config(replace(load_family("mimo"), trunk_type="vit"), {})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_act": "no such function"}, "cannot run qwen3 with this config"),
        ({"num_attention_heads": "eight"}, "cannot run qwen3 with this config"),
        ({"rope_parameters": {"rope_type": "twisted", "rope_theta": 1.0}}, "cannot run qwen3 with this config"),
        ({"head_dim": 24}, r"q_proj\.weight is \[128, 64\] in the checkpoint, \[192, 64\] in transformers"),
        ({"attention_bias": True}, r"transformers' qwen3 has .*\.bias, our family has no part"),
    ],
)
def test_a_config_that_does_not_fit(change: dict[str, Any], match: str) -> None:
    own = engine("qwen3_mtp")
    config = {**opened("qwen3_mtp")[0].config, **change}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match=f"^could not judge: .*{match}"):
        trunk.Trunk(config, own.weights)


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 9}, {"n_group": 3}, {"topk_group": 0, "n_group": 0}])
def test_a_config_that_shows_as_it_runs(change: dict[str, Any]) -> None:
    own = engine("glm4_moe")
    own.trunk = trunk.Trunk({**opened("glm4_moe")[0].config, **change}, own.weights)  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match=r"^could not judge: transformers cannot run glm4_moe with this config"):
        run(own, [IDS])


def test_keys_of_a_config_that_nobody_named_go_nowhere() -> None:
    checkpoint, _ = opened("mimo")
    hostile = {**checkpoint.config, "quantization_config": {"quant_method": "fp8"}, "_attn_implementation": "x"}  # type: ignore[dict-item]
    config = model_config(load_family("mimo"), {**hostile, "output_hidden_states": True, "name_or_path": "x/y"})
    assert config.model_type == "qwen2"
    assert not any(hasattr(config, key) for key in ("auto_map", "quantization_config", "output_router_logits"))
    assert config.name_or_path == "" and not config.output_hidden_states


def test_keys_that_megatron_does_not_tell_are_named() -> None:
    checkpoint, tensor_map = opened("glm4_moe")
    facts = {fact: value for fact, value in tensor_map.facts.items() if fact not in ("rope_theta", "topk")}
    bare = replace(checkpoint, config=None)
    with pytest.raises(UnsupportedError, match=r"does not tell rope_theta, num_experts_per_tok, .*--like"):
        Engine(bare, replace(tensor_map, model=replace(tensor_map.model, facts=facts)))


def test_no_mtp_layer_no_drafts() -> None:
    checkpoint, tensor_map = opened("qwen2_mtp")
    facts = {**tensor_map.facts, "mtp_stored": 0}
    with pytest.raises(UnsupportedError, match="holds no MTP layer"):
        Engine(checkpoint, replace(tensor_map, model=replace(tensor_map.model, facts=facts)))


@pytest.mark.parametrize("part", ["layers.1.mlp.experts.2.up", "head", "mtp.0.proj.hidden", "embed"])
def test_a_part_that_is_missing_is_named(part: str) -> None:
    checkpoint, tensor_map = opened("glm4_moe")
    parts = {name: ref for name, ref in tensor_map.parts.items() if name != part}
    with pytest.raises(UnsupportedError, match=f"^could not judge: the checkpoint holds no {part}"):
        run(Engine(checkpoint, replace(tensor_map, parts=parts)), [IDS])


def test_a_dtype_that_cannot_be_run_is_named() -> None:
    checkpoint, tensor_map = opened("glm4_moe")
    ref = tensor_map.parts["layers.0.attn.o"]
    parts = {**tensor_map.parts, "layers.0.attn.o": replace(ref, dtype="I16")}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.o is I16"):
        run(Engine(checkpoint, replace(tensor_map, parts=parts)), [IDS])


def test_an_mtp_layer_like_no_decoder_layer() -> None:
    _, tensor_map = opened("glm4_moe")
    model = replace(tensor_map.model, layers={**tensor_map.model.layers, "mtp.0": ["attn.q", "embed_norm"]})
    with pytest.raises(UnsupportedError, match="no decoder layer is made as MTP layer 0 is"):
        twin(model, 0)


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ([], "no text"),
        ([[1], []], "text 1 has no tokens"),
        ([[1, 260]], "id 260, expected 0 to 259"),
        ([[-1]], "id -1"),
    ],
)
def test_texts_that_cannot_be_run(texts: list[list[int]], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        run(engine("glm4_moe"), texts)


def test_a_text_of_one_token_has_no_drafts() -> None:
    (passage,) = run(engine("llama_mtp"), [[5]]).passages
    assert len(passage.main) == 1 and [len(drafts) for drafts in passage.drafts] == [0, 0]


# ---- what is relied on


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "glm_ocr_text", "llama", "qwen2", "qwen3"])
def test_what_the_engine_relies_on_in_transformers(kind: str) -> None:
    """Every name of transformers that mtpcheck uses and no release promises; a failure here says which one moved."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoModel

    assert kind in CONFIG_MAPPING
    assert CONFIG_MAPPING[kind] in MODEL_MAPPING
    within = CONFIG_MAPPING[kind].base_config_key == "text_config"
    assert within is kind.endswith("_text") and (within or CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING)
    small = {"num_hidden_layers": 4, "vocab_size": 8}
    with torch.device("meta"):
        decoder: Any = AutoModel.from_config(CONFIG_MAPPING[kind](**small), attn_implementation="eager")
    assert decoder.config._attn_implementation == "eager"
    assert isinstance(decoder.config._experts_implementation, str)
    assert len(decoder.layers) == 4
    assert isinstance(decoder.norm, torch.nn.Module)
    assert "inv_freq" in decoder.rotary_emb._non_persistent_buffers_set
    assert type(decoder.rotary_emb)(config=decoder.config).inv_freq.device.type == "cpu"
    for layer in decoder.layers:
        assert any(isinstance(getattr(layer, name, None), torch.nn.Module) for name in trunk.ATTENTION)
        for path, module in layer.named_modules():
            if path.endswith("." + trunk.EXPERTS):
                assert dict(module.named_parameters()).keys() == trunk.STACKED.keys()
                assert module.gate_up_proj.ndim == 3


@pytest.mark.parametrize("module", ["mtpcheck.draft.passage", "mtpcheck.draft"])
def test_plain_results_need_no_torch(module: str) -> None:
    heavy = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", heavy], check=False).returncode == 0
