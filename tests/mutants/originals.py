"""Sound checkpoints that mutants are made of: the fixtures, and variants of them that a mutation needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import coded, packed, wide
from tests.conftest import FIXTURES
from tests.mutants import anatomy, hf
from tests.mutants.case import Edit
from tests.mutants.values import fresh, permuted

LAYER_TYPES = ["full_attention"] * 3  # of qwen3_mtp: two decoder layers and the MTP layer
FP8 = "deepseek_v3 in FP8"
ERNIE = "ernie4_5_moe with two MTP layers"


def _of(fixture: str, edit: Edit) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        shutil.copytree(FIXTURES / fixture, folder)
        edit(folder)

    return make


def is_trunk(name: str) -> bool:
    """Matrices that are packed where the MTP layer is left alone; of glm4_moe, deepseek_v3 and qwen3_mtp."""
    return packed.is_linear(name) and not name.startswith(("model.layers.3.", "mtp."))


def head_modules(fixture: str) -> list[str]:
    """Modules of the MTP layer that could be packed."""
    names = (name for name in packed.stored(FIXTURES / fixture) if packed.is_linear(name) and not is_trunk(name))
    return sorted(name.removesuffix(".weight") for name in names)


def _plain_head(form: str, fixture: str) -> Callable[[Path], object]:
    """The trunk packed, the MTP layer plain and declared so."""
    return lambda folder: packed.make(folder, fixture, form, is_trunk, head_modules(fixture))


def _packed(form: str, fixture: str) -> Callable[[Path], object]:
    return lambda folder: packed.make(folder, fixture, form)


def _experts_packed(folder: Path) -> None:
    """Trunk and experts packed, attention and shared expert of the MTP layer plain and declared so."""
    plain = [name for name in head_modules("glm4_moe") if ".experts." not in name]
    packed.make(folder, "glm4_moe", "awq", lambda n: is_trunk(n) or (packed.is_linear(n) and ".experts." in n), plain)


def _with_projection(folder: Path) -> None:
    packed.make(folder, "deepseek_v3", "modelopt fp8", lambda name: packed.is_linear(name) or "eh_proj" in name)


MADE: Mapping[str, Callable[[Path], object]] = {
    "glm4_moe with a head of its own": _of("glm4_moe", hf.values(r"{layer}\.shared_head\.head", fresh)),
    "qwen2_mtp without a head": _of("qwen2_mtp", hf.both(
        hf.drop("{mtp}"), hf.config(lambda table: table.pop("num_nextn_predict_layers")))),
    "qwen3_mtp with a head of its own": _of("qwen3_mtp", hf.both(
        hf.add("lm_head.weight", "model.embed_tokens.weight", fresh),
        hf.config(lambda table: table.update(tie_word_embeddings=False)))),
    "qwen3_mtp with layer_types": _of("qwen3_mtp", hf.config(lambda table: table.update(layer_types=LAYER_TYPES))),
    "glm4_moe with mlp_layer_types": _of("glm4_moe", hf.config(
        lambda table: table.update(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]))),
    ERNIE: _of("ernie4_5_moe", hf.both(
        hf.again(r"(model\.mtp_\w+)\.0\.", r"\1.1.", permuted(0)),
        hf.count(lambda table, key: table.update({key: 2})))),
    "12 layers, 2 MTP": wide.make,
    FP8: lambda folder: coded.make(folder, "fp32", finite=True),
    "deepseek_v3 in FP8, scales of any value": lambda folder: coded.make(folder, "fp32"),
    "glm4_moe in AWQ": _packed("awq", "glm4_moe"),
    "glm4_moe in AWQ, head plain": _plain_head("awq", "glm4_moe"),
    "glm4_moe in AWQ, MTP attention plain": _experts_packed,
    "qwen3_mtp in int4, head plain": _plain_head("compressed-tensors int4", "qwen3_mtp"),
    "deepseek_v3 in GPTQ, head plain": _plain_head("gptq", "deepseek_v3"),
    "glm4_moe in NVFP4, head plain": _plain_head("modelopt nvfp4", "glm4_moe"),
    "deepseek_v3 in int8, described": _packed("modelslim", "deepseek_v3"),
    "deepseek_v3 in FP8, projection too": _with_projection,
    "deepseek_v3 in FP8 blocks": _packed("fp8", "deepseek_v3"),
}  # fmt: skip


@dataclass
class Originals:
    """Originals and what Megatron makes of them, each made once below ``folder``.

    ``call`` runs mtpcheck with arguments and returns its exit code.
    """

    folder: Path
    call: Callable[..., int]

    def hf(self, name: str) -> Path:
        """The Hugging Face folder."""
        if name not in MADE:
            return FIXTURES / name
        path = self.folder / "hf" / name.replace(" ", "_")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            MADE[name](path)
        return path

    def megatron(self, name: str, flags: str = "torch_dist") -> Path:
        """What ``mtpcheck convert --to`` with these flags makes of it."""
        path = self.folder / flags.replace(" ", "_").replace("|", "I") / name.replace(" ", "_")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            source = self.hf(name)
            images = anatomy.of(source).images
            code = self.call("convert", source, path, "--quiet", "--to", *flags.split(), *["--text-only"] * images)
            assert code == 0, f"convert {name} --to {flags}: exit {code}"
        return path

    def text(self) -> Path:
        """Every fourth passage of the bundled texts: enough to judge drafts by."""
        path = self.folder / "text.jsonl"
        if not path.exists():
            bundled = sorted((FIXTURES.parent / "mtpcheck" / "workloads").glob("*.jsonl"))
            lines = [line for source in bundled for line in source.read_text().splitlines(keepends=True)[::4]]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines))
        return path

    def mutant(self, name: str, made: str, edit: Edit, at: Path) -> Path:
        """A fresh copy at ``at``, edited."""
        shutil.copytree(self.megatron(name, made) if made else self.hf(name), at)
        edit(at)
        return at
