"""Names and configurations of models: what is known without transformers, and when it is another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal_core.runtime.checkpointing.hub import (
    Form,
    configuration_texts,
    drop_ignored,
    names_in_files,
    plan_reading,
    plan_writing,
    stored_names,
)


class Settings:
    """A configuration that writes itself, as models of many libraries have one."""

    def __init__(self, name: str, *, is_broken: bool = False) -> None:
        self.name, self.is_broken = name, is_broken

    def save_pretrained(self, folder: str) -> None:
        """Write one file."""
        if self.is_broken:
            raise ValueError("temperature is set, but unused")
        Path(folder, self.name).write_text(json.dumps({"width": 2}), encoding="utf-8")


class Described(nn.Linear):
    """A layer with a configuration."""

    def __init__(self, **settings: Settings) -> None:
        super().__init__(2, 2)
        for name, value in settings.items():
            setattr(self, name, value)


def make_foreign() -> nn.Module:
    """Return a model whose class says that it is of transformers, in a version that has nothing we know."""
    base = type("PreTrainedModel", (nn.Linear,), {"__module__": "transformers.modeling_utils"})
    model: nn.Module = type("Foreign", (base,), {})(2, 2)
    return model


def test_plain_models_are_stored_as_they_are() -> None:
    """Without transformers nothing is renamed; tied weights are stored under the first of their names."""
    model, form = nn.Linear(2, 2), Form(torch.float32, (2,))

    assert names_in_files(model) == {}
    assert stored_names(model, {"a": ("a", "b"), "c": ("c",)}) == {"a": ("a",), "c": ("c",)}
    assert plan_writing(model, {"bias": form}).renamed == {"bias": "bias"}
    assert plan_reading(model, {"a": form, "d": form}, {"a": form, "b": form}).renamed == {"a": "a"}
    assert drop_ignored(model, ["b", "a"], {"c"}) == (["a", "b"], ["c"])


def test_configurations_write_themselves() -> None:
    """Whatever can save itself is asked to, and a model without any has no files."""
    assert configuration_texts(nn.Linear(2, 2)) == {}
    model = Described(config=Settings("config.json"), generation_config=Settings("generation_config.json"))

    texts = configuration_texts(model)

    assert {name: json.loads(text) for name, text in texts.items()} == {
        "config.json": {"width": 2},
        "generation_config.json": {"width": 2},
    }


def test_configurations_that_cannot_be_written_do_not_stop_weights() -> None:
    """What is wrong with one is said; the others are written."""
    broken = Settings("generation_config.json", is_broken=True)
    model = Described(config=Settings("config.json"), generation_config=broken)

    with pytest.warns(UserWarning, match="generation_config is not written: temperature is set"):
        texts = configuration_texts(model)

    assert texts.keys() == {"config.json"}


def test_unknown_versions_keep_serial_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without the functions that are expected is no error, but a note."""
    for module in ("core_model_loading", "conversion_mapping"):
        monkeypatch.setitem(sys.modules, f"transformers.{module}", None)
    model, form = make_foreign(), Form(torch.float32, (2,))

    for found in (plan_writing(model, {"bias": form}), plan_reading(model, {"bias": form}, {"bias": form})):
        assert found.renamed == {"bias": "bias"}
        assert "ModuleNotFoundError" in found.note
    assert stored_names(model, {"bias": ("bias",)}) == {"bias": ("bias",)}
    assert drop_ignored(model, ["a"], ["b"]) == (["a"], ["b"])
