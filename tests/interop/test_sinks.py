"""The name, shape and cut of attention sinks are megatron-core's, of which MiMo-V2-Flash as a whole cannot be built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mtpcheck.dialects import load_dialect

from .support import HERE

HEADS, GROUPS, HEAD_DIM, HIDDEN = 4, 2, 8, 16  # as in sinks_worker.py


def test_sinks_are_cut_by_heads(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    call = [sys.executable, str(HERE / "sinks_worker.py")]
    init = f"file://{tmp_path / 'meet'}"
    ranks = [subprocess.Popen([*call, str(n), init, str(tmp_path)], env=env) for n in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2)]
    assert found[0] == found[1]
    ours = {role.names["te"]: role for role in load_dialect().layer if "softmax_offset" in role.names["te"]}
    assert list(ours) == ["self_attention.core_attention.softmax_offset"]
    sink = found[0].pop("self_attention.core_attention.softmax_offset")
    assert sink == {"own": [HEADS // 2], "whole": [HEADS], "cut": [0]}
    assert [role.shard for role in ours.values()] == [{"te": 0, "local": 0}]
    qkv = {"own": [HEADS * HEAD_DIM, HIDDEN], "whole": [2 * HEADS * HEAD_DIM, HIDDEN], "cut": [0]}
    assert found[0]["self_attention.linear_qkv.weight"] == qkv and GROUPS == HEADS // 2
