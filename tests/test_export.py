"""What an export makes of values that Megatron changed or holds in another dtype than the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.convert import Converted, convert
from mtpcheck.dtypes import cast
from mtpcheck.encoding import CODES
from mtpcheck.errors import CheckpointFails, UnsupportedError, UsageError
from mtpcheck.layouts.hf import read_hf
from mtpcheck.megatron import Options
from mtpcheck.move import read_plan
from mtpcheck.plan import Plan
from mtpcheck.proof import prove
from mtpcheck.quantize import Given, quantize
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import TensorRef
from mtpcheck.verify import verify
from tests import coded
from tests.conftest import FIXTURES
from tests.test_roundtrip import sha256

O_PROJ = "model.layers.2.self_attn.o_proj.weight"
IN_MEGATRON = "decoder.layers.2.self_attention.linear_proj.weight"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coded.make(tmp_path_factory.mktemp("coded") / "hf")


def saved_by_megatron(imported: Path, folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Megatron saves what it loaded into a folder of its own, where nothing of ours lies."""
    shutil.copytree(imported, folder, ignore=shutil.ignore_patterns("mtpcheck"))
    (file,) = folder.rglob("*.pt")
    root = torch.load(file, weights_only=False)
    edit(root["model"])
    torch.save(root, file)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def of_check(converted: Converted, check: str) -> list[str]:
    return [finding.subject for finding in converted.findings if finding.check == check]


# ---- FP8 that was trained on


def train(model: dict[str, Any]) -> None:
    model[IN_MEGATRON][3, 3] += 1


def test_what_training_changed_is_written_as_bf16_and_nothing_else(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "trained", train)
    converted = convert(tmp_path / "trained", tmp_path / "hf", like=tmp_path / "import")
    assert of_check(converted, "quantization.trained") == [O_PROJ]
    report = verify(source, tmp_path / "hf")
    changed = {f.subject for f in report.failures if not f.check.startswith(("declaration", "quantization"))}
    assert changed == {O_PROJ, O_PROJ + "_scale_inv"}
    assert verify(tmp_path / "trained", tmp_path / "hf").verdict == "holds"
    declared = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert declared["modules_to_not_convert"] == [O_PROJ.removesuffix(".weight")]


def test_what_training_changed_is_quantized_anew_on_request(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "import", "torch", options=Options("local"))
    trained = saved_by_megatron(
        tmp_path / "import", tmp_path / "trained", lambda model: model[IN_MEGATRON].normal_(std=0.02)
    )
    options = Options(fp8="requantize")
    converted = convert(trained, tmp_path / "hf", like=tmp_path / "import", options=options)
    assert of_check(converted, "quantization.anew") == [O_PROJ]
    before, after = tensors_of(source), tensors_of(tmp_path / "hf")
    changed = {n for n, t in before.items() if not torch.equal(t.view(torch.uint8), after[n].view(torch.uint8))}
    assert changed == {O_PROJ, O_PROJ + "_scale_inv"} and before.keys() == after.keys()
    (file,) = trained.rglob("*.pt")
    values = torch.load(file, weights_only=False)["model"][IN_MEGATRON].float()
    scales = after[O_PROJ + "_scale_inv"].repeat_interleave(40, 0)[: values.shape[0]]
    scales = scales.repeat_interleave(24, 1)[:, : values.shape[1]]
    assert torch.equal((values / scales).to(torch.float8_e4m3fn).view(torch.uint8), after[O_PROJ].view(torch.uint8))
    assert (after[O_PROJ].float() * scales - values).abs().max() <= values.abs().max() / 16
    assert (tmp_path / "hf" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert roundtrip(tmp_path / "hf").verdict == "holds"


@pytest.mark.parametrize("scales", ["powers", "one", "one_renamed"])
def test_new_scales_are_of_the_kind_of_the_old_ones(scales: coded.Scales, tmp_path: Path) -> None:
    made = coded.make(tmp_path / "source", scales)
    convert(made, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "trained", lambda m: m[IN_MEGATRON].normal_(std=0.02))
    convert(tmp_path / "trained", tmp_path / "hf", like=tmp_path / "import", options=Options(fp8="requantize"))
    before, after = tensors_of(made), tensors_of(tmp_path / "hf")
    name = O_PROJ + ("_scale" if scales == "one_renamed" else "_scale_inv")
    assert before.keys() == after.keys()
    assert after[name].shape == before[name].shape
    if scales == "powers":
        assert (torch.frexp(after[name]).mantissa == 0.5).all()


def test_values_without_a_code_are_not_quantized_anew(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "trained", lambda m: m[IN_MEGATRON].fill_(float("inf")))
    options = Options(fp8="requantize")
    converted = convert(tmp_path / "trained", tmp_path / "hf", like=tmp_path / "import", options=options)
    assert of_check(converted, "quantization.trained") == [O_PROJ] and not of_check(converted, "quantization.anew")
    assert tensors_of(tmp_path / "hf")[O_PROJ].dtype == torch.bfloat16


def test_without_kept_scales_an_export_is_bf16_and_says_so(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "import", "torch", options=Options("local"))
    bare = saved_by_megatron(tmp_path / "import", tmp_path / "bare", lambda model: None)
    converted = convert(bare, tmp_path / "hf", like=source)
    (found,) = of_check(converted, "quantization.trained")
    assert found.endswith(" and 67 more")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert verify(source, bare).verdict == "holds"
    trained = saved_by_megatron(tmp_path / "import", tmp_path / "trained", lambda m: m[IN_MEGATRON].normal_(std=0.02))
    converted = convert(trained, tmp_path / "anew", like=source, options=Options(fp8="requantize"))
    assert of_check(converted, "quantization.anew") == [O_PROJ]  # all others hold NaN
    assert [n for n, t in tensors_of(tmp_path / "anew").items() if t.dtype == torch.float8_e4m3fn] == [O_PROJ]


def blocks() -> Iterator[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (40, 24), (41, 25), (79, 100), (3, 24)):
        for scale in (0.0, 1e-38, 1e-6, 1.0, 1e38):
            yield (torch.randn(shape, generator=drawn).clamp(-1, 1) * scale).bfloat16()


@pytest.mark.parametrize("powers", [False, True])
def test_quantized_anew_and_back_is_within_half_a_step_of_every_value(powers: bool) -> None:
    """Half a step of e4m3 is a 16th of the value, or of the smallest normal one: 2^-6 / 448 of the largest."""
    for values in blocks():
        raw = values.view(torch.int16).numpy().tobytes()
        ref = TensorRef("BF16", Plan.region(Given("x", raw), 0, tuple(values.shape), 2))
        made = quantize("x", ref, (40, 24), powers)
        assert made is not None
        codes = torch.frombuffer(read_plan(made[0].plan), dtype=torch.float8_e4m3fn).reshape(values.shape).double()
        grid = torch.frombuffer(read_plan(made[1].plan), dtype=torch.float32).reshape(made[1].shape).double()
        scales = grid.repeat_interleave(40, 0)[: values.shape[0]].repeat_interleave(24, 1)[:, : values.shape[1]]
        assert (
            (codes * scales - values.double()).abs() <= (values.double().abs() / 16).clamp(min=scales * 2**-9)
        ).all()


def test_values_whose_codes_would_be_infinite_are_not_quantized() -> None:
    raw = torch.full((2, 2), 3.3e38).bfloat16().view(torch.int16).numpy().tobytes()
    assert quantize("x", TensorRef("BF16", Plan.region(Given("x", raw), 0, (2, 2), 2)), (40, 24), True) is None


# ---- codes in Megatron


def test_codes_in_megatron_s_files_are_torch_s(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "kept", "torch", options=Options("local", fp8="keep"))
    (file,) = tmp_path.rglob("*.pt")
    held = torch.load(file, weights_only=False)["model"][IN_MEGATRON]
    assert held.dtype == torch.float8_e4m3fn
    assert torch.equal(held.view(torch.uint8), tensors_of(source)[O_PROJ].view(torch.uint8))


def test_codes_saved_by_torch_are_read_again(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "kept", "torch", options=Options("local", fp8="keep"))
    moved = saved_by_megatron(tmp_path / "kept", tmp_path / "moved", lambda model: None)
    convert(moved, tmp_path / "hf", like=tmp_path / "kept")
    assert sha256(tmp_path / "hf") == sha256(source)
    with pytest.raises(CheckpointFails, match="holds FP8 codes without scales beside"):
        convert(moved, tmp_path / "bare")


def test_a_changed_code_in_megatron_is_found(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "kept", "torch", options=Options("local", fp8="keep"))
    (file,) = tmp_path.rglob("*.pt")
    root = torch.load(file, weights_only=False)
    root["model"][IN_MEGATRON].view(torch.uint8)[1, 2] ^= 1
    torch.save(root, file)
    (found,) = verify(source, tmp_path / "kept").failures
    assert (found.check, found.subject) == ("values.bits", O_PROJ)


@pytest.mark.parametrize("via", ["torch_dist", "torch"])
def test_kept_codes_are_proved_by_plan(source: Path, via: Any) -> None:
    report = prove(source, options=Options("local", fp8="keep"), via=via)
    assert report.verdict == "holds"
    details = {check.group: (check.status, check.detail) for check in report.checks}
    assert details["plan"][1].endswith(" 0 value nodes")
    assert details["quantization"] == ("passed", "68 FP8 tensors stay codes; scales lie beside Megatron")


def test_a_tensor_half_codes_half_bf16_cannot_be_kept(source: Path, tmp_path: Path) -> None:
    """megatron-core stacks the experts of a layer; one of these is plain, and declared so."""
    folder = Path(shutil.copytree(source, tmp_path / "mixed"))
    expert = "model.layers.3.mlp.experts.1"

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(expert + ".")]:
            scale = tensors.pop(name) if name.endswith("_scale_inv") else None
            if scale is None:
                tensors[name] = tensors[name].bfloat16()

    rewrite(folder, plain)
    coded.index_again(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [expert]
    (folder / "config.json").write_text(json.dumps(config))
    assert roundtrip(folder).verdict == "holds"
    with pytest.raises(UnsupportedError, match="joins tensors of different dtypes"):
        roundtrip(folder, options=Options(fp8="keep"))


COLLAPSED = 1e-40


def collapse(folder: Path, name: str = O_PROJ) -> Path:
    """One scale so small that bf16 cannot tell codes apart."""
    rewrite(folder, lambda t: t[name + "_scale_inv"].fill_(COLLAPSED) if name in t else None)
    return folder


def test_codes_that_values_do_not_tell_survive_every_way_through_megatron(source: Path, tmp_path: Path) -> None:
    made = collapse(Path(shutil.copytree(source, tmp_path / "source")))
    convert(made, tmp_path / "kept", options=Options(fp8="keep"))
    convert(tmp_path / "kept", tmp_path / "values", "torch")
    convert(tmp_path / "values", tmp_path / "hf")
    assert sha256(tmp_path / "hf") == sha256(made)


def test_codes_that_nothing_tells_are_never_guessed(source: Path, tmp_path: Path) -> None:
    made = collapse(Path(shutil.copytree(source, tmp_path / "source")))
    convert(made, tmp_path / "values", "torch")
    (aside,) = (tmp_path / "values").rglob("aside.safetensors")
    kept = load_file(aside)
    edits: list[Callable[[dict[str, torch.Tensor]], Any]] = [
        lambda t: t.pop(O_PROJ),
        lambda t: t.update({O_PROJ: t[O_PROJ][1:].clone()}),
        lambda t: t.update({O_PROJ: t[O_PROJ].view(torch.uint8)}),
    ]
    for edit in edits:
        tensors = dict(kept)
        edit(tensors)
        save_file(tensors, aside)
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        converted = convert(tmp_path / "values", tmp_path / "hf")
        assert of_check(converted, "quantization.trained") == [O_PROJ]
        assert tensors_of(tmp_path / "hf")[O_PROJ].dtype == torch.bfloat16


@pytest.mark.parametrize("fp8", ["dequantize", "keep"])
@pytest.mark.parametrize("scale", [0.01, COLLAPSED])
def test_copies_in_fp8_come_back(fp8: Any, scale: float, source: Path, tmp_path: Path) -> None:
    """An MTP layer's embedding and head, which Megatron leaves out, as codes like those they repeat."""
    made = Path(shutil.copytree(source, tmp_path / "source"))
    copies = {"model.embed_tokens.weight", "lm_head.weight", "model.layers.3.embed_tokens.weight",
              "model.layers.3.shared_head.head.weight"}  # fmt: skip

    def code(tensors: dict[str, torch.Tensor]) -> None:
        for name in copies & tensors.keys():
            tensors[name] = torch.arange(tensors[name].numel()).to(torch.uint8).reshape(tensors[name].shape)
            grid = [-(-n // edge) for n, edge in zip(tensors[name].shape, coded.BLOCK, strict=True)]
            tensors[name] = tensors[name].view(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.full(grid, scale)

    rewrite(made, code)
    coded.index_again(made)
    report = roundtrip(made, options=Options(fp8=fp8), keep=tmp_path / "kept")
    assert report.verdict == "holds", report.failures
    assert sha256(tmp_path / "kept" / "hf") == sha256(made)


def test_like_lends_no_scales_to_a_checkpoint_that_has_its_own(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    rewrite(other, lambda t: [t[n].mul_(3) for n in t if n.endswith("_scale_inv")])
    for fp8 in ("keep", "dequantize"):
        convert(source, tmp_path / f"own-{fp8}", options=Options(fp8=fp8))
        convert(other, tmp_path / f"other-{fp8}", options=Options(fp8=fp8))
        for number, like in enumerate((tmp_path / f"other-{fp8}", source)):
            convert(tmp_path / f"own-{fp8}", tmp_path / f"hf-{fp8}-{number}", like=like)
            assert sha256(tmp_path / f"hf-{fp8}-{number}") == sha256(source)


def test_like_is_for_exports(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "m")
    with pytest.raises(UsageError, match="--like lends its form to a Hugging Face export"):
        convert(tmp_path / "m", tmp_path / "n", "torch", like=source)


def test_requantize_needs_a_reason(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "m")
    with pytest.raises(UsageError, match="nothing says that this was FP8"):
        convert(tmp_path / "m", tmp_path / "hf", options=Options(fp8="requantize"))


def test_codes_that_megatron_held_as_fp32_come_back(source: Path, tmp_path: Path) -> None:
    def widen(model: dict[str, Any]) -> None:
        model[IN_MEGATRON] = model[IN_MEGATRON].float()

    convert(source, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "saved", widen)
    convert(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "import")
    assert sha256(tmp_path / "hf") == sha256(source)


def test_codes_joined_with_fp32_come_back(source: Path, tmp_path: Path) -> None:
    """megatron-core stacks the experts: one is plain fp32, and declared so, the others are codes."""
    made = Path(shutil.copytree(source, tmp_path / "mixed"))
    expert = "model.layers.3.mlp.experts.1"

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(expert + ".")]:
            if name.endswith("_scale_inv"):
                del tensors[name]
            else:
                tensors[name] = torch.randn(tensors[name].shape)

    rewrite(made, plain)
    coded.index_again(made)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [expert]
    (made / "config.json").write_text(json.dumps(config))
    report = roundtrip(made, keep=tmp_path / "kept")
    assert report.verdict == "holds", report.failures
    assert sha256(tmp_path / "kept" / "hf") == sha256(made)


def test_only_mtp_looks_at_no_scales_of_the_trunk(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "kept", options=Options(fp8="keep"))
    other = Path(shutil.copytree(source, tmp_path / "other"))
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    rewrite(other, lambda t: t[name].mul_(2) if name in t else None)
    assert verify(other, tmp_path / "kept", only_mtp=True).verdict == "holds"
    assert verify(other, tmp_path / "kept").verdict == "fails"


def test_a_block_of_any_size_is_a_block(source: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(source, tmp_path / "huge"))
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [1, 10**30]
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFails, match="one scale for each block"):
        convert(made, tmp_path / "m")


@pytest.mark.parametrize(("fp8", "to"), [("requantize", "torch"), ("keep", "hf")])
def test_flags_of_the_other_direction_are_refused(fp8: Any, to: Any, source: Path, tmp_path: Path) -> None:
    origin = source if to != "hf" else FIXTURES / "megatron" / "core-0.16.1" / "moe_tp1" / "torch_dist"
    with pytest.raises(UsageError, match=f"--fp8 {fp8} is for the other direction"):
        convert(origin, tmp_path / "x", to, options=Options(fp8=fp8))


# ---- dtypes

WIDE_NAMES = ("model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.q_norm.weight")


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, {"format": "pt"})


def widen(tensors: dict[str, torch.Tensor]) -> None:
    """Fp32 values that bf16 does not hold."""
    for name in tensors.keys() & set(WIDE_NAMES):
        tensors[name] = tensors[name].float() * 1.0001


def glm(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(FIXTURES / "glm4_moe", folder)
    rewrite(folder, edit)
    coded.index_again(folder)
    return folder


def as_params(model: dict[str, Any]) -> None:
    """Modules with bf16 parameters round what they load; the router's bias stays fp32."""
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and "expert_bias" not in name:
            model[name] = value.bfloat16()


def test_wide_values_that_megatron_rounded_come_back(tmp_path: Path) -> None:
    made = glm(tmp_path / "source", widen)
    converted = convert(made, tmp_path / "import", "torch", options=Options("local"))
    (found,) = (f for f in converted.findings if f.check == "values.aside")
    assert found.subject == "2 tensors"
    saved_by_megatron(tmp_path / "import", tmp_path / "saved", as_params)
    converted = convert(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "import")
    assert sorted(of_check(converted, "values.kept")) == sorted(WIDE_NAMES)
    assert sha256(tmp_path / "hf") == sha256(made)


def test_wide_values_that_megatron_trained_are_megatron_s(tmp_path: Path) -> None:
    def train(model: dict[str, Any]) -> None:
        as_params(model)
        model["decoder.layers.1.input_layernorm.weight"][5] += 1

    made = glm(tmp_path / "source", widen)
    convert(made, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "saved", train)
    converted = convert(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "import")
    assert of_check(converted, "values.rounded") == [WIDE_NAMES[0]]
    assert of_check(converted, "values.kept") == [WIDE_NAMES[1]]
    before, after = tensors_of(made), tensors_of(tmp_path / "hf")
    (file,) = (tmp_path / "saved").rglob("*.pt")
    held = torch.load(file, weights_only=False)["model"]["decoder.layers.1.input_layernorm.weight"]
    assert torch.equal(after[WIDE_NAMES[0]], held.float())
    assert all(torch.equal(after[n], t) for n, t in before.items() if n != WIDE_NAMES[0])


def test_without_kept_values_megatron_s_are_widened(tmp_path: Path) -> None:
    made = glm(tmp_path / "source", widen)
    convert(made, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "saved", as_params)
    converted = convert(tmp_path / "saved", tmp_path / "hf", like=made)
    assert sorted(of_check(converted, "values.rounded")) == sorted(WIDE_NAMES)
    assert tensors_of(tmp_path / "hf")[WIDE_NAMES[0]].dtype == torch.float32


BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    if BIAS in tensors:
        tensors[BIAS] = tensors[BIAS].bfloat16()


@pytest.mark.parametrize(("step", "fits"), [(0.0, True), (1e-6, False)])
def test_what_megatron_holds_wider_is_narrowed_if_nothing_is_lost(step: float, fits: bool, tmp_path: Path) -> None:
    """Megatron keeps the router's bias in fp32, whatever the release had."""
    made = glm(tmp_path / "source", narrow)

    def load(model: dict[str, Any]) -> None:
        name = "decoder.layers.2.mlp.router.expert_bias"
        model[name] = model[name].float() + step

    convert(made, tmp_path / "import", "torch", options=Options("local"))
    saved_by_megatron(tmp_path / "import", tmp_path / "saved", load)
    against = verify(made, tmp_path / "saved")
    assert (against.verdict == "holds") == fits
    assert [f.subject for f in against.findings if f.check == "values.dtype"] == [BIAS]
    converted = convert(tmp_path / "saved", tmp_path / "hf", like=tmp_path / "import")
    if fits:
        assert sha256(tmp_path / "hf") == sha256(made)
    else:
        assert of_check(converted, "values.rounded") == [BIAS]
        assert tensors_of(tmp_path / "hf")[BIAS].dtype == torch.float32


JOINED = "model.layers.2.mlp.experts.1.gate_proj.weight"


@pytest.mark.parametrize("via", ["torch_dist", "torch"])
def test_tensors_of_several_dtypes_that_megatron_joins_round_trip(via: Any, tmp_path: Path) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        if JOINED in tensors:
            tensors[JOINED] = tensors[JOINED].float() * 1.0001

    made = glm(tmp_path / "source", mix)
    report = roundtrip(made, via=via, keep=tmp_path / "kept")
    assert report.verdict == "holds", report.findings
    assert sha256(tmp_path / "kept" / "hf") == sha256(made)
    assert prove(made, via=via).verdict == "holds"


def bits(dtype: str) -> np.ndarray[Any, Any]:
    """All values of a 16-bit dtype; of F32 some of every exponent, with what decides how they are rounded."""
    if dtype != "F32":
        return np.arange(1 << 16, dtype=np.uint16)
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    return (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF], np.uint32)).reshape(-1)


TORCH: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.mark.parametrize("source_dtype", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_casts_are_torch_s(source_dtype: str, target: str) -> None:
    raw = bits(source_dtype)
    ref = TensorRef(source_dtype, Plan.region(Given("x", raw.tobytes()), 0, raw.shape, raw.itemsize))
    got = torch.frombuffer(read_plan(cast(ref, target).plan), dtype=TORCH[target])
    expected = torch.frombuffer(bytearray(raw.tobytes()), dtype=TORCH[source_dtype]).to(TORCH[target])
    number = ~torch.isnan(expected)
    assert torch.equal(got[number].view(torch.uint8), expected[number].view(torch.uint8))
    assert torch.isnan(got[~number]).all()
    if source_dtype != "F32" and target == "F32":
        back = read_plan(cast(cast(ref, "F32"), source_dtype).plan)
        assert source_dtype == "F16" or bytes(back) == raw.tobytes()


def test_header_of_the_fixture_has_codes(source: Path) -> None:
    assert sum(ref.dtype == CODES for ref in read_hf(source).tensors.values()) == 68
