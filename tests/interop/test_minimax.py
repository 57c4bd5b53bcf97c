"""megatron-core computes what transformers does of MiniMax-M3, from what mtpcheck wrote: all but the indexers, which no
megatron-core has. Where these may choose every block, they change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.cli import run as cli

from .support import FIXTURES, HERE, read_hf
from .support import run as start


def without_indexers(folder: Path) -> Path:
    """The fixture with full attention in every layer, a clamp that bites, and routers in bf16, as modules have them."""
    folder.mkdir()
    config = json.loads((FIXTURES / "minimax_m3" / "config.json").read_text())
    config["text_config"] |= {"num_mtp_modules": None, "num_nextn_predict_layers": None, "swiglu_limit": 0.25}
    config["text_config"]["sparse_attention_config"]["sparse_attention_freq"] = [0, 0]
    (folder / "config.json").write_text(json.dumps(config))
    plain = {name: tensor for name, tensor in read_hf("minimax_m3").items() if ".index_" not in name}
    routers = {
        name: tensor.bfloat16() for name, tensor in plain.items() if name.endswith("block_sparse_moe.gate.weight")
    }
    save_file(plain | routers, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.skipif(not os.environ.get("MTPCHECK_ALL"), reason="half a minute: make test-all")
def test_megatron_computes_what_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    source = without_indexers(tmp_path / "hf")
    assert cli(["convert", str(source), str(tmp_path / "megatron"), "--text-only", "--quiet"]) == 0
    written = tmp_path / "megatron" / "release"
    start(HERE / "minimax_worker.py", written, tmp_path / "out")
    keys = json.loads((tmp_path / "out" / "keys.json").read_text())
    ours = {name: list(ref.shape) for name, ref in open_checkpoint(written).tensors.items()}
    assert {name: shape for name, shape in keys.items() if not name.endswith("_extra_state")} == ours
    theirs = load_file(tmp_path / "out" / "logits.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(input_ids=theirs["ids"]).logits
    torch.testing.assert_close(theirs["logits"][..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-4)
    assert expected.std() > 0.1
