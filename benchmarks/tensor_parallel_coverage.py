"""Which architectures of transformers are cut, and whether the numbers are those of one process.

For each causal, masked, sequence-to-sequence and image-classification architecture a small random model is
trained for one step on two ranks and in one process, in fp64. The verdicts:

- *exact*: loss, every gradient and every updated weight agree to 1e-8, and at least 90% of the elements of
  matrices are cut;
- *partly*: they agree, with less of it cut;
- *refused*: a documented error says why;
- *not built*: the small model does not run in one process, so nothing can be compared;
- *wrong*: anything else.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.architectures import Wide, build_model, list_architectures, make_batch

BOUND = 1e-8


def judge(task: str, name: str, degree: int, sequence: bool) -> dict[str, Any]:  # noqa: FBT001 - sent to ranks
    """Train on this rank and in one process, and compare; runs on every rank.

    Returns:
        ``verdict``, ``cut`` (part of the elements of matrices), ``reason`` and the largest ``error``.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        return _judge(task, name, degree, sequence=sequence)
    finally:
        torch.set_default_dtype(torch.float32)


def _judge(task: str, name: str, degree: int, *, sequence: bool) -> dict[str, Any]:
    """Do what `judge` says."""
    try:
        serial = build_model(name)
        batch = make_batch(serial, task)
        expected = _step_alone(serial, batch)
    except Exception as err:  # noqa: BLE001 - code of many authors
        return {"verdict": "not built", "reason": f"{type(err).__name__}: {str(err)[:200]}"}
    return compare(build_model(name), batch, expected, degree, sequence=sequence)


def compare(
    model: Any, batch: dict[str, Any], expected: dict[str, Any], degree: int, *, sequence: bool = False
) -> dict[str, Any]:
    """Train a model on ranks and compare with what one process had."""
    from colossal_core import Booster, ColossalError
    from colossal_tensor_parallel import TensorParallel

    matrices = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    booster = Booster(TensorParallel(degree=degree, sequence=sequence), precision="fp64")
    try:
        model, optimizer = booster.boost(model, optimizer)
    except ColossalError as err:
        return {"verdict": "refused", "reason": err.message[:300]}
    held = {n: p.numel() for n, p in model.named_parameters() if n in matrices}
    cut = sum(matrices[n] for n in held if held[n] < matrices[n]) / max(sum(matrices.values()), 1)
    torch.manual_seed(3)
    with Wide():
        loss = loss_of(model(**batch))
        loss.backward()
    with booster.full_gradients(model) as shown:
        gradients = {n: g.clone() for n, g in shown.items()}
    optimizer.step()
    with booster.full_parameters(model) as shown:
        weights = {n: w.clone() for n, w in shown.items()}
    booster.release(model)  # activations of some models are objects of the library that others share
    missing = set(expected["gradients"]) ^ set(gradients)
    errors = {"loss": abs(float(loss.detach()) - expected["loss"])}
    for kind, mine in (("gradients", gradients), ("weights", weights)):
        scale = max((float(t.abs().max()) for t in expected[kind].values() if t.numel()), default=1.0)
        for n, tensor in expected[kind].items():
            if n in mine and tensor.numel():
                errors[f"{kind} of {n}"] = float((mine[n] - tensor).abs().max()) / max(scale, 1e-12)
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    found = {"cut": round(cut, 4), "error": errors[worst]}
    extra = {n for n in missing if n in gradients and float(gradients[n].abs().max()) == 0}
    if missing - extra:
        return {
            **found,
            "verdict": "wrong",
            "reason": f"gradients of {sorted(missing - extra)[:3]} on one side only",
        }
    if not errors[worst] <= BOUND:
        return {**found, "verdict": "wrong", "reason": f"{worst} differs by {errors[worst]:.2g}"}
    return {**found, "verdict": "exact" if cut >= 0.9 else "partly", "reason": ""}


def _step_alone(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Take one step in one process."""
    torch.manual_seed(3)
    with Wide():
        loss = loss_of(model(**batch))
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if not all(bool(torch.isfinite(g).all()) for g in gradients.values()) or not torch.isfinite(loss):
        raise ValueError("the small model has gradients that are not finite")
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    return {
        "loss": float(loss.detach()),
        "gradients": gradients,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss of a model's outputs, or something that depends on all of the first."""
    loss = outputs.get("loss") if hasattr(outputs, "get") else None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    first: torch.Tensor = (
        outputs[0] if not hasattr(outputs, "get") or outputs.get("logits") is None else outputs["logits"]
    )
    weights = torch.linspace(-1, 1, first.numel(), dtype=first.dtype).reshape(first.shape).cos()
    total: torch.Tensor = (first * weights).mean()
    return total


def main() -> None:
    """Judge every architecture, or those that are named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="model types, or class names")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--sequence", action="store_true", help="also divide what lies between the layers")
    parser.add_argument("--json", type=Path, help="write the verdicts here, and keep those that are there")
    parser.add_argument("--table", type=Path, help="write a page of documentation here")
    chosen = parser.parse_args()
    from colossal_testkit.ranks import run_ranks

    path = chosen.json
    found = json.loads(path.read_text()) if path is not None and path.exists() else []
    known = {row["name"] for row in found}
    for task, kind, name in list_architectures():
        if chosen.only and kind not in chosen.only and name not in chosen.only:
            continue
        if name in known:
            continue
        try:
            given = (task, name, chosen.degree, chosen.sequence)
            verdict = run_ranks(judge, chosen.degree, *given, timeout_seconds=120)[0]
        except Exception as err:  # noqa: BLE001 - one architecture must not end the others
            verdict = {"verdict": "wrong", "reason": str(err)[:1500]}
        found.append({"task": task, "kind": kind, "name": name, **verdict})
        if path is not None:
            path.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{task:8} {name:45} {verdict['verdict']:10} {verdict.get('cut', '')} {verdict['reason'][:300]}",
            flush=True,
        )
    counts: dict[str, int] = {}
    for row in found:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    print(counts)
    if chosen.table:
        chosen.table.write_text(make_page(found, chosen.degree))


def make_page(found: list[dict[str, Any]], degree: int) -> str:
    """Return the page with all verdicts."""
    import transformers

    verdicts = ("exact", "partly", "refused", "not built", "wrong")
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    lines = [
        "# Architectures that tensor parallelism cuts",
        "",
        f"Measured by `nox -s coverage_tensor_parallel` with {versions}, on {degree} ranks.",
        "A small random model of each architecture takes one step in one process and on the ranks, in fp64.",
        "*exact*: loss, gradients and weights agree to 1e-8, and 90% of the elements of matrices are cut.",
        "*partly*: they agree, with fewer cut. *not built*: the small model did not run in one process.",
        "",
        "| task | " + " | ".join(verdicts) + " |",
        "|---|" + "--:|" * len(verdicts),
    ]
    for task in dict.fromkeys(row["task"] for row in found):
        numbers = [sum(r["task"] == task and r["verdict"] == v for r in found) for v in verdicts]
        lines.append(f"| {task} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "| architecture | task | verdict | cut |", "|---|---|---|--:|"]
    for row in found:
        cut = f"{row['cut']:.1%}" if "cut" in row else ""
        lines.append(f"| {row['name']} | {row['task']} | {row['verdict']} | {cut} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
