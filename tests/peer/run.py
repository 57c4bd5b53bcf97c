"""mcore_bridge under the gate: the outcome that docs/peers.md records, case by case. Started by ``make peer``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED: dict[str, tuple[str, set[str]]] = {
    "the count of MTP layers is passed": ("holds", set()),
    "as it comes": ("fails", {"presence.missing", "declaration.mtp", "declaration.count"}),
    "as it comes, missing weights filled in": ("fails", {"presence.missing", "declaration.mtp", "values.bits"}),
    "Qwen3-Next, in its own order": ("fails", {"declaration.config"}),  # ffn_hidden_size, which no layer has
}
"""Case → verdict, and the checks that fail; where values were filled in, with cause ``back-filled`` alone."""


def main() -> int:
    command = [sys.executable, "-m", "mtpcheck", "gate", "--config", str(HERE / "mtpcheck.yaml"), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:  # it has complained on stderr
        return 2
    document = json.loads(done.stdout)
    wrong = 0
    for (name, (verdict, checks)), case in zip(EXPECTED.items(), document["cases"], strict=True):
        failures = [finding for finding in case["findings"] if finding["severity"] == "failure"]
        found = {finding["check"] for finding in failures}
        causes = {finding.get("cause_id") for finding in failures if finding["check"] == "values.bits"}
        as_expected = (case["verdict"], found) == (verdict, checks) and causes <= {"back-filled"}
        wrong += not as_expected
        print(f"{'as recorded' if as_expected else 'CHANGED':<12} {name}: {case['verdict']} {sorted(found)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
