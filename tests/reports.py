"""Reports made without a checkpoint: a sound one, a failing one with everything in it, and one as large as they get."""

from __future__ import annotations

import numpy as np

from mtpcheck.draft.acceptance import measure
from mtpcheck.draft.alive import judge
from mtpcheck.draft.passage import ABLATIONS, Passage, Touched
from mtpcheck.draft.probe import Column
from mtpcheck.draft.writing import Written
from mtpcheck.report.finding import Finding, failure, note, warning
from mtpcheck.report.report import Component, Declared, Report, Unjudged

WORKLOADS = ("prose", "code", "chat", "maths")
LAYERS = 46
EXPERTS = tuple(f"model.layers.46.mlp.experts.{n}.gate_proj.weight" for n in range(128))
HOSTILE = "</script><b onclick=x>&amp;|`*_[](http://a.b)\n::error::x%\x1b[31m\u202e,:\ud800"
ENDED = Unjudged(
    "roundtrip", ["ckpt/GLM-4.5-Air"],
    "ckpt/GLM-4.5-Air/model-00001-of-00003.safetensors: cut off: the header promises 5,368,709,120 bytes, "
    "and 1,024 are there; copy the file again",
)  # fmt: skip


def passage(rate: float, seed: int, depths: int = 1, tokens: int = 120) -> Passage:
    """A text whose drafts are accepted at ``rate``, and at a quarter of it with something taken out of the head."""
    random = np.random.default_rng(seed)
    ids, main = random.integers(0, 50, tokens), random.integers(0, 50, tokens)

    def drafts(share: float, depth: int) -> np.ndarray:
        right = random.random(tokens - depth) < share
        return np.where(right, main[depth:], (main[depth:] + 1) % 50)

    return Passage(
        ids,
        main,
        tuple(drafts(rate**depth, depth) for depth in range(1, depths + 1)),
        {name: drafts(rate / 4, 1) for name in ABLATIONS},
        tuple(f"{rate}-{seed}-{depth}" for depth in range(depths)),
    )


def column(label: str, rate: float = 0.9, depths: int = 1, same_as: str = "") -> Column:
    """What a checkpoint drafts on four workloads, each a little harder than the one before."""
    texts = {name: [passage(rate - 0.05 * n, 10 * n + k, depths) for k in range(6)] for n, name in enumerate(WORKLOADS)}
    every = [own for passages in texts.values() for own in passages]
    overall = measure(every)
    touched = Touched(frozenset({"embed"}), {"mtp.0.copy.embed": "repeats embed, which engines use in its place"}, 9)
    workloads = {name: measure(own) for name, own in texts.items()}
    return Column(label, workloads, overall, judge(overall), tuple(every), touched, 1, same_as)


def components(layers: int = LAYERS, bad: bool = False) -> list[Component]:
    """A mixture of experts, dense in its first layer; ``bad``: two things are wrong."""
    own = [Component("embed", 1, 1_240_000_000, 1)]
    own += [Component("layers.0", 10, 240_000_000, 10)]
    own += [Component(f"layers.{n}", 400, 2_300_000_000, 400, 2 * (bad and n == 3)) for n in range(1, layers)]
    own += [Component("final_norm", 1, 8192, 1), Component("head", 1, 1_240_000_000, 1)]
    return [*own, Component("mtp.0", 405, 2_400_000_000, 404 if bad else 405, 128 * bad, int(bad))]


def sound() -> Report:
    """A round trip that holds."""
    report = Report("roundtrip", ["ckpt/GLM-4.5-Air"], "glm4_moe", "glm4_moe · hf → torch_dist → hf · 1 MTP layer")
    report.add("structure", [], "17,815 in hf, 553 in torch_dist")
    report.add("presence", [], "17,816 parts, 405 of them in MTP layers")
    report.add("declaration", [], "num_nextn_predict_layers=1 → mtp_num_layers=1")
    report.add("values", [], "220,000,000,000 bytes compared bit for bit")
    report.add("result", [], "54 of 54 files byte-identical")
    report.add("acceptance", [], "2,500 of 2,832 drafts accepted; mean acceptance length 1.88")
    report.components = components()
    report.declared = [Declared("num_nextn_predict_layers", "1", "1")]
    report.acceptance = [column("source"), column("torch_dist"), column("result", same_as="source")]
    return report


def joined() -> Finding:
    """A finding that explains many tensors."""
    return failure(
        "values.bits", "gate and up of 128 experts of mtp.0", "the bits of 128 tensors differ",
        expected="gate 0xbdc7 (-0.0972) first", got="0x3c7c (0.0154)", cause_id="gate-up-exchanged", members=EXPERTS,
        where="converted/model-00047-of-00047.safetensors, byte 177,952",
    )  # fmt: skip


def failing() -> Report:
    """A verify with everything in it, and names that no renderer may trust."""
    report = Report("verify", ["ckpt/GLM-4.5-Air", "runs/2026-11/converted-with-our-tool/hf"], "glm4_moe",
                    "glm4_moe · hf → hf · 1 MTP layer")  # fmt: skip
    report.add("structure", [], "17,815 in hf, 17,814 in hf")
    report.add("presence", [failure("presence.missing", "model.layers.46.eh_proj.weight", "is not stored",
                                    expected="BF16 [4096, 8192]", cause="the converter does not know the MTP layer",
                                    todo="carry model.layers.46.*"),
                            failure("presence.unclaimed", HOSTILE, f"belongs to no part: {HOSTILE}"),
                            failure("presence.copy", "mtp.0.copy.head", "differs from the head", source=True)],
               "17,815 parts, 404 of them in MTP layers")  # fmt: skip
    report.add("declaration", [failure("declaration.mtp", "num_nextn_predict_layers", "vanished", expected="1"),
                               warning("declaration.config", "rope_scaling", "changed", expected="null", got="{}"),
                               warning("declaration.count", "mtp", "declared twice", source=True)],
               "num_nextn_predict_layers=1 → nothing")  # fmt: skip
    report.add(
        "values", [joined(), note("values.aside", "embed", "values are kept beside Megatron")], "220 GB compared"
    )
    report.skip("files", "tokenizer and other files were not looked at")
    report.add("acceptance", [failure("acceptance.logits", "candidate", "draft logits differ in 24 of 24 passages")],
               "2,500 of 2,832 drafts accepted; mean acceptance length 1.88")  # fmt: skip
    report.components = components(bad=True)
    report.declared = [
        Declared("num_nextn_predict_layers", "1", ""),
        Declared("rope_scaling", "null", '{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}'),
        Declared("num_hidden_layers", "46", "46"),
    ]
    report.acceptance = [column("reference", depths=2), column("candidate", 0.5, depths=2)]
    report.written = [Written("prose", 64, 40, 40, 40, 24)]
    report.notes = ["embed              1.240 GB   unchanged", f"a name: {HOSTILE}"]
    return report


def huge() -> Report:
    """60,000 tensors of 120 layers, 5,000 findings of which one has all tensors of the model as members."""
    report = Report("verify", ["a", "b"], "deepseek_v3", "deepseek_v3 · hf → hf · 1 MTP layer")
    names = [
        f"model.layers.{n}.mlp.experts.{k}.{part}.weight"
        for n in range(120) for k in range(166) for part in ("gate_proj", "up_proj", "down_proj")
    ]  # fmt: skip
    findings = [
        failure("values.bits", name, "8,180 of 8,192 elements differ, first at [0, 0]", expected="0xbdc7 (-0.0972)",
                got="0x3c7c (0.0154)", where=f"converted/model-{n:05}-of-05000.safetensors, byte 177,952")
        for n, name in enumerate(names[:4000])
    ]  # fmt: skip
    findings.append(failure("values.bits", "every matrix", "is zero", cause_id="zeroed", members=tuple(names)))
    report.add("values", findings, "1.4 TB compared bit for bit")
    warnings = [warning("declaration.config", f"key_{n}", "changed", expected="1", got="2") for n in range(999)]
    report.add("declaration", warnings, "1 → 1")
    report.components = [Component(f"layers.{n}", 500, 12_000_000_000, 500, 33 * (n < 80)) for n in range(120)]
    report.components.append(Component("mtp.0", 505, 12_000_000_000, 505))
    report.declared = [Declared(f"key_{n}", "1", "2") for n in range(999)]
    report.notes = [f"layers.{n}  moved by 0.001" for n in range(9000)]
    parts = {name: "no token was routed to it" for name in names}
    report.acceptance = [column("reference")]
    report.acceptance[0].touched.not_ran.update(parts)  # type: ignore[attr-defined]
    return report
