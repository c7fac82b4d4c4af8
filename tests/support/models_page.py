"""The table of docs/models.md: each family's checks, run here, and what the others lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ranked_families
import torch
from image_families import (
    IMAGE_FAMILIES,
    adapted_with_images,
    image_logprobs,
    image_policy,
    own_image_logprobs,
    plain_image_model,
    usual,
)
from model_families import (
    FAMILIES,
    adapted,
    distance,
    gradients,
    has_experts,
    mean_distance,
    our_policy,
    own_logprobs,
    packed_logprobs,
    plain_model,
    samples,
)

from gradus.config.families import (
    ADAPTED_EXPERTS,
    FLOAT32_ALONE,
    MISSING,
    TRAINED,
    TRAINED_ON_CPUS,
    UNSAMPLED,
    UNSAMPLED_EXPERTS,
    WITH_IMAGES,
)
from gradus.errors import ConfigError

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ENGINE = _RESULTS / "engine_logprobs.json"
"""What `benchmarks/engine_logprobs.py` found."""
ON_GPUS = _RESULTS / "gpu_families.json"
"""What `benchmarks/gpu_families.py` found."""
_EXACT = 1e-5
"""Nats that adapters may be from merged weights."""
HEAD = """# Models: what is trained

`gradus check` answers from a model's `config.json` alone: trained, trained on CPUs only, or what is
missing. A family that stands in no table is tried: before its first step a trainer compares its
logprobs with those of the model's own forward, and refuses it where they differ
([training](training.md#start)). `scripts/models` writes this page from the checks of
`tests/support/model_families.py`, on small random models of each family (four layers, hidden size
128), whose published weights are bit by bit those that were read.
`python benchmarks/family_run.py CASE` trains one by RL with vLLM; its numbers are in
`benchmarks/results/family_run.json`.

- **Packed = alone**: largest distance in nats between the logprobs of six samples in one row and
  those of each by itself, in float32; then that of the gradients, relative to their norm. At most
  2e-6, or twice what rounding moves the model's own.
- **bfloat16**: mean distance from float32 over that of the model's own forward in bfloat16.
- **Two ranks**: largest distance of a weight from that of one rank after three steps of 1e-3. Where
  it is more than 1e-5, the same by gradient descent in brackets: AdamW makes a whole step of the
  rounding in a gradient close to zero.
- **Two ranks of one context**: the same with `context_parallel_size = 2`, by heads; a dash where
  it was not asked.
- **Two ranks of experts**: the same with `expert_parallel_size = 2`; a dash without experts.
- **Adapters**: whether linear layers, and experts asked apart, take them; logprobs are those of the
  merged model within 1e-5.
- **On a GPU**, of `benchmarks/gpu_families.py` (one H100, torch 2.11): mean distance of logprobs
  from float32, and that of gradients, over those of the model's own forward in bfloat16 on a CPU.
  Above 1.3 it is refused there.
- **Engine = trainer**, of `benchmarks/engine_logprobs.py`: 800 tokens that vLLM's build for CPUs
  sampled, scored by the trainer, on the first weights and on others: largest distance in nats and
  `mismatch_kl`, in float32; in bfloat16; a dash where it was not asked. `gradus rl` takes what is
  below 2e-5 nats in float32; in bfloat16 too, but for families that are over twice as far there as
  `qwen3` is. Three kernels of vLLM's build are replaced for it
  ([why](decisions.md#kernels-of-a-cpu-engine-that-are-graduss-own)). A reason in words means that
  `gradus rl` refuses the family, and `gradus sft` trains it.

`gemma4` is the whole model. Images are read and their tower is trained where they attend as text
does (E2B, E4B). Where they attend both ways (`use_bidirectional_attention = "vision"`: 26B-A4B,
31B) text alone is trained, and images are refused. Sounds are refused everywhere.
"""


EXPERTS_HEAD = """## Experts of the engine

`mismatch_kl` of the same 800 tokens in bfloat16, on the weights on which it is larger.

| family | `router_replay = "off"` | `"engine"` |
|---|---|---|"""
WITH = "Trained with images"
CHECKS = ("packed = alone", "bfloat16", "adapters")
RANKS = {
    "two ranks": "2",
    "two ranks of one context": "context",
    "two ranks of experts": "experts",
}
"""The layout of each."""
COLUMNS = ("`model_type`", *CHECKS, *RANKS, "on a GPU", "engine = trainer")


def page(weights: Path | None, only: Collection[str] | None, before: str) -> str:
    """The page; `weights` is a folder for what is found, where what was found is not asked again;
    `only` the families that are asked. The others have what lies in the folder, or else what the
    page `before` says."""
    torch.set_num_threads(1)
    families = {case: it[0] for case, it in (IMAGE_FAMILIES | FAMILIES).items()}
    asked = [case for case, family in families.items() if only is None or family in only]
    folder = weights or Path(tempfile.mkdtemp(prefix="gradus_ranks_"))
    _train_by_ranks(folder, asked)
    kept, by_family = _cells(before), defaultdict[str, list[str]](list)
    for case, family in families.items():
        by_family[family].append(case)
    lines = [HEAD]
    tables = {
        "Trained": TRAINED,
        "Trained on CPUs": TRAINED_ON_CPUS - WITH_IMAGES,
        WITH: WITH_IMAGES,
    }
    for title, names in tables.items():
        lines += [f"## {title}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        for name in sorted(names):
            cases = by_family[name]
            cells = kept[name] | _found(folder, cases, is_asked=only is None or name in only)
            cells |= {"on a GPU": _on_gpus(name, cases), "engine = trainer": _engine(name, cases)}
            row = [cells.get(column, "-") for column in COLUMNS[1:]]
            lines.append(f"| {' | '.join([f'`{name}`', *row])} |")
        lines.append("")
    lines += ["## Not trained", "", "| `model_type` | for want of |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(MISSING.items())]
    return "\n".join([*lines, *_replayed_experts()]) + "\n"


def _replayed_experts() -> list[str]:
    """What replaying the engine's experts changes, by family."""
    lines = ["", *EXPERTS_HEAD.splitlines()]
    noted: Any = json.loads(ENGINE.read_text())
    for case, found in sorted(noted.items()):
        experts = found.get("bfloat16", {}).get("experts")
        if experts is None:
            continue
        off, on = (
            max(experts[f"{name}_{word}"]["mismatch_kl"] for name in ("first", "published"))
            for word in ("off", "on")
        )
        lines.append(f"| {case} | {off:.1e} | {on:.1e} |")
    return lines


def _train_by_ranks(folder: Path, cases: Sequence[str]) -> None:
    """Leave there the weights that one rank and two have trained of these cases."""
    port = str(20_000 + os.getpid() % 9_000)
    for name, (size, _) in ranked_families.LAYOUTS.items():
        asked = [
            it
            for it in cases
            if (name != "experts" or _has_experts(it))
            and not (folder / name / f"{it}.npz").exists()
        ]
        if not asked:
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        words = [sys.executable, ranked_families.__file__, str(folder / name), *asked]
        world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": port}
        world |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        ranks = [subprocess.Popen(words, env=os.environ | world | place) for place in places]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank failed; its message is above")


def _has_experts(case: str) -> bool:
    return has_experts(case) or "num_experts" in IMAGE_FAMILIES.get(case, ("", {}))[1]


def _apart(folder: Path, cases: Sequence[str], layout: str) -> str:
    """The worst of a family's variants that the layout is for."""
    if not cases:
        return "-"

    def worst(rule: str) -> float:
        return max(ranked_families.ranks_apart(folder, case, layout, rule) for case in cases)

    by_adamw = f"{worst(''):.1e}"
    return by_adamw if worst("") <= _EXACT else f"{by_adamw} ({worst('.sgd'):.1e})"


def _found(folder: Path, cases: list[str], *, is_asked: bool) -> dict[str, str]:
    """By column: what the folder holds, and with `is_asked` what `_checks` finds."""
    saved, cells = folder / f"{cases[0]}.json", {}
    if is_asked and not saved.is_file():
        saved.write_text(json.dumps(_checks(cases)))
    if saved.is_file():
        cells = dict(zip(CHECKS, json.loads(saved.read_text()), strict=True))
    for column, layout in RANKS.items():
        mine = [case for case in cases if layout != "experts" or _has_experts(case)]
        places = [folder / it / f"{case}.npz" for case in mine for it in ("1", layout)]
        if all(it.is_file() for it in places):
            cells[column] = _apart(folder, mine, layout)
    return cells


def _cells(page: str) -> defaultdict[str, dict[str, str]]:
    """Of each family in the tables, by column."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    columns: list[str] = []
    for line in page.splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[0] == COLUMNS[0]:
            columns = cells
        elif line.startswith("| `") and len(cells) == len(columns):
            found[cells[0].strip("`")] = dict(zip(columns, cells, strict=True))
    return found


def _on_gpus(family: str, cases: list[str]) -> str:
    """The worst of a family's variants and ways."""
    if family in WITH_IMAGES & TRAINED_ON_CPUS:
        return "refused, as its part for text is"
    noted: Any = json.loads(ON_GPUS.read_text())["cases"]
    rows = [way for case in cases for way in noted.get(case, {}).values() if "gpu" in way]
    shares = [[ours / own for ours, own in zip(it["gpu"], it["own"], strict=True)] for it in rows]
    return ", ".join(f"{max(it):.2f}" for it in zip(*shares, strict=True)) or "-"


def _engine(family: str, cases: list[str]) -> str:
    """The worst of a family's variants, or why it has no numbers."""
    if family in UNSAMPLED:
        return f"vLLM {UNSAMPLED[family]}"
    noted: Any = json.loads(ENGINE.read_text())
    cells = []
    for dtype in ("float32", "bfloat16"):
        rows = [noted.get(case, {}).get(dtype, {}) for case in cases]
        pairs = [row[name] for row in rows for name in ("first", "published") if name in row]
        worst = [max(pair[key] for pair in pairs) for key in ("max", "mismatch_kl") if pairs]
        cells.append(", ".join(f"{it:.1e}" for it in worst) or "-")
    if family in FLOAT32_ALONE:
        cells.append("sampled in float32 alone")
    if family in UNSAMPLED_EXPERTS:
        cells.append(f"vLLM {UNSAMPLED_EXPERTS[family]}")
    return "; ".join(cells)


def _checks(cases: list[str]) -> list[str]:
    """The worst of a family's variants, by what the trainer alone computes."""
    if cases[0] in IMAGE_FAMILIES:
        return _image_checks(cases)
    found = samples()
    logprobs = gradient = ratio = 0.0
    for case in cases:
        plain, policy = plain_model(case), our_policy(case)
        ours, own = packed_logprobs(policy, found), own_logprobs(plain, found)
        by_ours, by_own = gradients(policy.model, ours), gradients(plain, own)
        logprobs = max(logprobs, distance(ours, own))
        gradient = max(gradient, *(float((by_ours[n] - by_own[n]).abs().max()) for n in by_own))
        with torch.no_grad():
            half = packed_logprobs(our_policy(case, torch.bfloat16), found)
            own_half = own_logprobs(plain_model(case, torch.bfloat16), found)
        ratio = max(ratio, mean_distance(half, own) / mean_distance(own_half, own))
    try:
        assert adapted(cases[0])[0] <= _EXACT
        taken = ["layers"]
    except ConfigError:
        taken = []
    if FAMILIES[cases[0]][0] in ADAPTED_EXPERTS:
        case = next(it for it in cases if has_experts(it))
        assert adapted(case, ["experts"])[0] <= _EXACT
        taken.append("experts")
    return [f"{logprobs:.1e}, {gradient:.1e}", f"{ratio:.2f}", ", ".join(taken) or "none"]


def _image_checks(cases: list[str]) -> list[str]:
    """The same of a model that reads images, on samples with none, one and two."""
    case = cases[0]
    found, plain, policy = usual(), plain_image_model(case), image_policy(case)
    ours, own = image_logprobs(policy, found), own_image_logprobs(plain, found)
    by_ours, by_own = gradients(policy.model, ours), gradients(plain, own)
    gradient = max(float((by_ours[name] - by_own[name]).abs().max()) for name in by_own)
    with torch.no_grad():
        half = image_logprobs(image_policy(case, torch.bfloat16), found)
        own_half = own_image_logprobs(plain_image_model(case, torch.bfloat16), found)
    assert adapted_with_images(case)[0] <= _EXACT
    taken = ["layers"]
    if IMAGE_FAMILIES[case][0] in ADAPTED_EXPERTS:
        of_text = next((it for it in cases if it in FAMILIES and has_experts(it)), None)
        found_by_experts = adapted_with_images if of_text is None else adapted
        assert found_by_experts(of_text or case, ["experts"])[0] <= _EXACT
        taken.append("experts")
    return [
        f"{distance(ours, own):.1e}, {gradient:.1e}",
        f"{mean_distance(half, own) / mean_distance(own_half, own):.2f}",
        ", ".join(taken),
    ]
