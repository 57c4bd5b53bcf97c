"""How tensor parallelism cuts gated attention and delta nets: shares have the shapes that megatron-core builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtpcheck.convert import convert
from mtpcheck.megatron import Options
from mtpcheck.topology import Topology
from tests.megatron_edit import load_pickled

from .support import FIXTURES, HERE


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_every_share_has_megatron_core_s_shape(name: str, tmp_path: Path) -> None:
    options = Options(topology=Topology(tp=2, etp=2), experts="sequential" if name == "qwen3_next" else None,
                      text_only=True)  # fmt: skip
    convert(FIXTURES / name, tmp_path / "ranks", "torch", options=options)
    written = tmp_path / "ranks" / "release"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    call = [sys.executable, str(HERE / "gated_ranks_worker.py")]
    given = [f"file://{tmp_path / 'meet'}", str(written), str(tmp_path)]
    ranks = [subprocess.Popen([*call, str(n), *given], env=env) for n in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for n in range(2):
        model = load_pickled(written / f"mp_rank_0{n}" / "model_optim_rng.pt")["model"]
        ours = {key: list(value.shape) for key, value in model.items()
                if isinstance(value, torch.Tensor) and not key.endswith("_extra_state")}  # fmt: skip
        assert any("in_proj" in key for key in ours) and any("linear_qkv" in key for key in ours)
        assert ours == json.loads((tmp_path / f"{n}.json").read_text())
