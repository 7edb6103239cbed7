"""The small tokenizer and templates of `tests/data/text`, written out as checkpoint directories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from irminsul_jax.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "text"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONFIG: dict[str, Any] = {"bos_token": {"content": BOS}, "eos_token": EOS, "add_bos_token": True}

MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> MakeTokenizer:
    """make_tokenizer(template name or None, change=function on the tokenizer.json, **tokenizer_config)"""

    def make(template: str | None = None, change: Callable[[dict], object] | None = None, **config: Any) -> Tokenizer:
        content = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
        if change is not None:
            change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        if template is not None:
            shutil.copy(DATA / f"{template}.jinja", tmp_path / "chat_template.jinja")
        return Tokenizer.from_directory(tmp_path)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(DATA / "tokenizer.json")


@pytest.fixture(scope="session")
def templates() -> dict[str, Tokenizer]:
    config = DATA / "tokenizer_config.json"
    names = ("reasoning", "hybrid", "turns", "default_system")
    return {
        name: Tokenizer.from_file(DATA / "tokenizer.json", config=config, chat_template=DATA / f"{name}.jinja")
        for name in names
    }
