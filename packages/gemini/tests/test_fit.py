"""What is said of a model before it trains."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core.errors import UsageError
from colossal_gemini import Gemini
from colossal_gemini.costs import TIERS, Budgets, Rates
from colossal_gemini.eviction import find_peak
from colossal_gemini.report import FitReport, judge
from colossal_testkit.models import GPT, TokenLoss

from .traces import sweep

IDS = torch.zeros(2, 6, dtype=torch.long)


def fit_gpt(options: Gemini, **more: Any) -> FitReport:
    """Return the report on a small GPT."""
    return options.fit(GPT(num_blocks=6), (IDS, IDS), criterion=TokenLoss(), **more)


def test_a_model_that_fits_is_placed_within_budgets() -> None:
    """Everything has a home, and a table says where."""
    report = fit_gpt(Gemini(device_budget=200_000, host_budget="1MiB"))

    assert report.fits
    assert report.placement is not None
    held = {tier: sum(report.placement.bytes_in(tier).values()) for tier in TIERS}
    assert sum(held.values()) == 16 * sum(parameter.numel() for parameter in GPT(num_blocks=6).parameters())
    assert held["device"] > 0 < held["host"] < 1 << 20
    assert find_peak(report.trace, report.placement.room).total <= 200_000
    assert report.moved_bytes["device to host"] > 0
    assert report.slow_down > 1
    assert "GPT of 32K parameters in fp32 on 1 rank: fits" in str(report)
    assert "moments" in str(report)


@pytest.mark.parametrize("more", [{}, {"ranks": 2, "precision": "bf16"}, {"recompute": True}])
def test_the_least_budget_fits_and_one_byte_less_does_not(more: Mapping[str, Any]) -> None:
    """And the refusal says what would."""
    least = fit_gpt(Gemini(device_budget=1), **more).least_budget
    assert least is not None

    enough = fit_gpt(Gemini(device_budget=least), **more)
    short = fit_gpt(Gemini(device_budget=least - 1), **more)

    assert enough.fits
    assert not short.fits
    assert "1 more than its budget" in short.refusal
    assert f"device_budget be at least {least}" in short.hint
    assert "does not fit" in str(short)


def test_short_host_memory_is_refused_with_three_ways_out() -> None:
    """More of it, files, or more of the device: each with its number, and each is enough."""
    short = fit_gpt(Gemini(device_budget=400_000, host_budget="100KiB"))

    assert not short.fits
    host = int(short.hint.split("host_budget be at least ")[1].split(",")[0])
    assert f", or device_budget at least {short.least_budget}" in short.hint
    for budgets in (
        Budgets(device=400_000, host=host),
        Budgets(device=short.least_budget or 0, host=100 << 10),
    ):
        assert judge(short.trace, budgets).fits


def test_a_short_device_and_short_host_memory_are_refused_with_enough_of_both() -> None:
    """Each way out that the hint names is enough: both together, more of the device, or smaller chunks."""
    short = fit_gpt(Gemini(device_budget=1000, host_budget="100KiB"))

    numbers = [int(text) for text in re.findall(r"(?:at least |=)([0-9]+)", short.hint)]
    device, host, alone, chunk, with_it = numbers
    assert "; besides, let host_budget be at least" in short.hint
    assert alone == short.least_budget
    assert judge(short.trace, Budgets(device=device, host=host)).fits
    assert not judge(short.trace, Budgets(device=device - 1, host=host)).fits
    assert judge(short.trace, Budgets(device=alone, host=100 << 10)).fits
    assert fit_gpt(Gemini(device_budget=with_it, host_budget="100KiB", chunk_bytes=chunk)).fits


def test_a_device_that_holds_everything_moves_nothing() -> None:
    """And a step takes as long as without."""
    report = fit_gpt(Gemini(device_budget="1GiB"))

    assert not any(report.moved_bytes.values())
    assert report.slow_down == pytest.approx(1)


def test_a_saved_report_is_read_without_torch(tmp_path: Path) -> None:
    """It is worked out again from its trace, and equal."""
    path = tmp_path / "report.json"
    trace = sweep(4, size=100, gradients=True, other=9)
    report = judge(trace, Budgets(device=500), title="a sweep", ranks=2, rates=Rates(gather=7.0))

    report.save(path)

    assert FitReport.load(path) == report
    code = (
        "import sys; from colossal_gemini.report import FitReport; "
        f"print(FitReport.load({str(path)!r})); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(report)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """Whatever the file holds; as are arguments that mean nothing."""
    path = tmp_path / "report.json"
    path.write_text("{}", encoding="utf-8")

    with pytest.raises(UsageError, match="is no saved report"):
        FitReport.load(path)
    with pytest.raises(UsageError, match="precision 'fp8'"):
        Gemini().fit(nn.Linear(1, 1), {}, precision="fp8")


def test_moves_are_those_of_the_formula() -> None:
    """Everything on the host: gradients and gathers, each once for every byte, and no new values."""
    trace = sweep(6, size=100, gradients=True, value_bytes=2)
    least = judge(trace, Budgets(device=0)).least_budget or 0

    report = judge(trace, Budgets(device=least), policy="static")

    assert report.plan is not None
    assert report.moved_bytes["device to host"] == 6 * 200
    assert report.moved_bytes["host to device"] == report.plan.num_gathers * 200
    assert report.plan.num_gathers == 2 * 6 - 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_gpt_of_24_billion_on_one_device_is_judged_in_seconds() -> None:
    """40 GB of device and 512 GiB of host memory, in 16 bits, with recomputation."""
    start = time.process_time()
    with torch.device("meta"):
        model = GPT(num_blocks=71, vocabulary=50304, width=6400, heads=50, length=2048)
        ids = torch.zeros(4, 2048, dtype=torch.long)

    report = Gemini(device_budget="40GB", host_budget="512GiB").fit(
        model, (ids, ids), criterion=TokenLoss(), precision="bf16", recompute=True
    )

    seconds = time.process_time() - start
    assert report.fits
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_llama_of_70_billion_on_eight_devices_is_judged_in_seconds() -> None:
    """80 GB each, and 1 TiB of host memory for all of them; a model of transformers on the meta device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,  # keys and values of a cache would stay until backward has ended
    )
    start = time.process_time()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(1, 4096, dtype=torch.long)

    report = Gemini(device_budget="80GB", host_budget="128GiB").fit(
        model, {"input_ids": ids, "labels": ids}, precision="bf16", recompute=True, ranks=8
    )

    seconds = time.process_time() - start
    assert report.fits
    assert report.waste < 0.02
    assert seconds < 30
