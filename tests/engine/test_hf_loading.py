"""Folders that are no model, or two: what is wrong with them is told in one line."""

from __future__ import annotations

import json

import pytest

from raykv.engine.hf_runner import HFModelRunner
from raykv.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_size", "32", "cannot load the model .* expected int, got str"),
        ("layer_types", ["x"], "cannot load the model .*layer_types"),
        ("model_type", "zzz", "cannot load the model .*zzz"),
        ("intermediate_size", 72, r"other shapes .*mlp.* instead of \("),
    ],
)
def test_a_config_that_does_not_fit_is_told_in_one_line(
    tmp_path, tiny_llama, setting, value, message
):
    tiny_llama.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with pytest.raises(ConfigError, match=message) as caught:
        HFModelRunner.load(tmp_path, block_size=4)
    assert "\n" not in str(caught.value)
