"""Fields of config.json as published models and tools write them: read, or refused by name.

The table holds facts of published files with sizes scaled down, and what each family's fields say
in the layouts of transformers 4 and 5 and of tools for fine-tuning and conversion.
"""

import json
from pathlib import Path

import pytest

from specjax.errors import InputError
from specjax.loading.formats.families import registry
from specjax.loading.formats.huggingface_config import read_config

TABLE = json.loads((Path(__file__).parent / "goldens" / "published_configs.json").read_text())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_a_config_is_read_or_refused_by_name(row, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    if (field := row.get("refused")) is None:
        config, _ = read_config(tmp_path, None)
        stated = row["config"].get("text_config", {}).get("model_type")
        assert config.family == (stated or row["config"]["model_type"])
        return
    with pytest.raises(InputError) as caught:
        read_config(tmp_path, None)
    message = str(caught.value)
    assert f"config.json: {field}=" in message
    assert "\n" not in message


def test_all_families_are_in_the_table():
    accepted = {row["config"]["model_type"] for row in TABLE if "refused" not in row}
    assert accepted == {*registry.FAMILIES, *registry.TEXT_PARTS}
